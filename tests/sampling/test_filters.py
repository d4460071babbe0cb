"""Floors of top-k, top-p and min-p: by window and by search they are those of a full sort."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from aioinfer.sampling import filters
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.filters import _floors_by_search
from tests.sampling.support import make_batch, random_logits, random_row, reference_floor


def floors(scaled: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
    return filters.floors(
        scaled,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        any_top_k=batch.any_top_k,
        any_top_p=batch.any_top_p,
        any_min_p=batch.any_min_p,
    )


def scaled_rows(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    lines = []
    while len(lines) < rows:
        logits = random_logits(rng, vocab)
        if np.isfinite(logits.max()):
            with np.errstate(over="ignore"):
                lines.append(logits - logits.max())
    return np.stack(lines)


@pytest.mark.parametrize("vocab", [1, 2, 63, 300, 1025, 5000])
def test_floors_are_those_of_a_full_sort(vocab: int) -> None:
    for seed in range(12):
        rng = np.random.default_rng([seed, vocab])
        scaled = scaled_rows(rng, 8, vocab)
        rows = [random_row(rng) for _ in range(8)]
        batch = make_batch(rows)
        wanted = [reference_floor(line, row) for line, row in zip(scaled, rows, strict=True)]
        tensor = torch.from_numpy(scaled)
        assert floors(tensor, batch).flatten().tolist() == wanted, (seed, rows)
        # The way of the devices that must not be asked anything.
        top_k = (batch.top_k * (batch.top_k < vocab)).unsqueeze(1)
        floor = _floors_by_search(tensor, top_k, batch.top_p.unsqueeze(1), batch.any_top_k, batch.any_top_p)
        floor = torch.maximum(floor, batch.min_p.unsqueeze(1).log())
        assert floor.flatten().tolist() == wanted, (seed, rows)


def test_the_window_is_searched_further_only_where_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[int] = []
    search = filters._floors_by_search

    def spy(scaled: torch.Tensor, *rest: object) -> torch.Tensor:
        searched.append(len(scaled))
        return search(scaled, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(filters, "_floors_by_search", spy)
    peaked = -torch.arange(20_000.0).expand(4, -1)
    floors(peaked, make_batch([{"top_p": 0.9}, {"top_k": 50}, {"top_k": 3, "top_p": 0.5}, {}]))
    floors(peaked, make_batch([{"top_k": 50}, {"top_k": 3000}, {"top_k": 1}, {"top_k": 2}]))
    assert searched == []
    flat = torch.zeros(4, 20_000)
    floor = floors(flat, make_batch([{"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.5}, {}]))
    assert searched == [2]
    assert floor.flatten().tolist() == [0.0, 0.0, float(np.log(np.float32(0.5))), -np.inf]


def test_ties_at_the_threshold_all_stay() -> None:
    scaled = torch.tensor([[-1.0, 0.0, -1.0, -1.0, -2.0, -3.0]])
    assert float(floors(scaled, make_batch([{"top_k": 2}]))) == -1.0
    # 0 has 0.434 of the mass, so half of it needs one of the three at -1.
    assert float(floors(scaled, make_batch([{"top_p": 0.5}]))) == -1.0
    assert float(floors(scaled, make_batch([{"top_p": 0.4}]))) == 0.0


def test_a_share_that_is_met_exactly_needs_no_more() -> None:
    near = torch.tensor(-0.6931472) + torch.arange(-4, 5) * 2.0**-24
    half = float(near[near.exp() == 0.5][0])
    scaled = torch.tensor([[half, 0.0, half, -20.0, -torch.inf]])
    batch = make_batch([{"top_p": 0.5, "top_k": 3}])
    assert float(floors(scaled, batch)) == 0.0
    top_k, top_p = batch.top_k.unsqueeze(1), batch.top_p.unsqueeze(1)
    assert float(_floors_by_search(scaled, top_k, top_p, True, True)) == 0.0
