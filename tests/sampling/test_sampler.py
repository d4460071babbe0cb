"""The sampler against exact distributions and, token for token, against the plainest implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.sampling.backend import SamplingBackend
from aioinfer.sampling.batch import PenaltyReset
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.sampling.sampler import Sampler
from tests.sampling.support import (
    CPU,
    make_batch,
    penalise,
    random_logits,
    random_row,
    reference,
)
from tests.tiers import SECONDS, rest


@rest(SECONDS)
@pytest.mark.parametrize(("vocab", "rounds"), [(2, 60), (7, 60), (300, 60), (3000, 12), (5000, 12)])
def test_every_row_equals_the_plain_implementation(
    vocab: int, rounds: int, sampling: SamplingBackend
) -> None:
    """Mixed batches of greedy and filtered rows, penalties, bans, ties, infinities, broken rows."""
    for seed in range(rounds):
        rng = np.random.default_rng([seed, vocab])
        lines, rows, resets, wanted = [], [], [], []
        for slot in range(1, 8):
            line, row = random_logits(rng, vocab), random_row(rng)
            if rng.random() < 0.3:
                row["banned"] = set(rng.integers(0, vocab, 3).tolist())
            prompt, output = (rng.integers(0, vocab, 5).tolist() for _ in range(2))
            if rng.random() < 0.3:
                row |= {
                    "repetition_penalty": rng.choice([0.7, 1.3]),
                    "frequency_penalty": rng.choice([0, 0.6]),
                }
                resets.append(PenaltyReset(slot, prompt, output))
            wanted.append(reference(penalise(line, prompt, output, row), row))
            lines.append(line)
            rows.append(row)
        before = torch.from_numpy(np.stack(lines))
        logits = before.clone()
        batch = make_batch(rows, penalty_resets=resets)
        got = Sampler(8, vocab, CPU, sampling).sample(logits, batch)
        assert got.dtype == torch.int64
        assert got.tolist() == wanted, (seed, rows)
        assert torch.equal(before.nan_to_num(), logits.nan_to_num()), "the logits were written to"


def test_taking_rows_one_at_a_time_changes_nothing() -> None:
    """What a CPU does with a large vocabulary equals what other devices do with any."""
    rng = np.random.default_rng(8)
    logits = torch.from_numpy(np.stack([random_logits(rng, 5000) for _ in range(40)]))
    batch = make_batch([random_row(rng) for _ in range(40)])
    sampler = Sampler(40, 5000, CPU, "torch")
    assert torch.equal(sampler.sample(logits, batch), sampler._rows(logits, batch))


def test_nothing_is_read_back_from_the_device() -> None:
    """The meta device has shapes and no values: whatever asks for one raises."""
    meta = torch.device("meta")
    sampler = Sampler(8, 5000, meta)
    everything = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "banned": (3, 4)}
    for rows in ([{"temperature": 0}, {}], [{"top_k": 4}, {}], [everything, {"temperature": 0}]):
        batch = make_batch(rows, device=meta, penalty_resets=[PenaltyReset(1, [1, 2], [3])])
        tokens = sampler.sample(torch.empty(2, 5000, device=meta), batch)
        assert tokens.shape == (2,)
        assert tokens.dtype == torch.int64


def test_a_greedy_batch_draws_nothing_penalised_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where what rows ask for cannot be looked at."""
    monkeypatch.setattr(Sampler, "_draw", None)
    sampler = Sampler(2, 6, CPU, "torch")
    sampler._on_host = False
    rows = [{"temperature": 0.0}, {"temperature": 0.0, "repetition_penalty": 10.0}]
    batch = make_batch(rows, penalty_resets=[PenaltyReset(2, [5], [])])
    assert batch.all_greedy
    assert sampler.sample(torch.arange(6.0).expand(2, -1), batch).tolist() == [5, 4]


# -- corners -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [50, 5000])
def test_top_k_of_one_is_greedy_and_the_lowest_of_equal_ids_wins(
    vocab: int, sampling: SamplingBackend
) -> None:
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(3)).round()
    greedy = Sampler(8, vocab, CPU, sampling).sample(logits, make_batch([{"temperature": 0}] * 6)).tolist()
    assert greedy == [int((line == line.max()).nonzero()[0]) for line in logits]
    mixed = Sampler(8, vocab, CPU, sampling).sample(logits, make_batch([{"temperature": 0}, {}] * 3)).tolist()
    assert mixed[::2] == greedy[::2]
    # Without ties, one survivor.
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(3))
    for row in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-9}):
        assert (
            Sampler(8, vocab, CPU, sampling).sample(logits, make_batch([row] * 6)).tolist()
            == logits.argmax(1).tolist()
        )


@pytest.mark.parametrize("vocab", [50, 5000])
@pytest.mark.parametrize(
    "row",
    [
        {"temperature": 0.0},
        {},
        {"top_p": 0.5},
        {"top_k": 3},
        {"min_p": 0.5},
        {"top_k": 9, "top_p": 0.9, "min_p": 0.01, "temperature": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5, "temperature": 0.0},
    ],
)
def test_rows_without_a_finite_maximum_fail_alone(
    row: dict[str, Any], vocab: int, sampling: SamplingBackend
) -> None:
    logits = torch.randn(8, vocab, generator=torch.Generator().manual_seed(0))
    logits[0, 3] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    logits[3, vocab - 1] = math.nan
    logits[3, 0] = math.inf
    logits[4, 3] = math.nan
    logits[5, 1:] = -math.inf
    logits[6, 10:] = -math.inf
    # A ban hides no NaN, and may leave nothing.
    rows = [{**row, "seed": at} for at in range(8)]
    rows[4]["banned"] = [3]
    rows[5]["banned"] = [0]
    resets = [PenaltyReset(slot, [1, 2], [2, 3]) for slot in range(1, 9)]
    tokens = Sampler(8, vocab, CPU, sampling).sample(logits, make_batch(rows, penalty_resets=resets)).tolist()
    assert tokens[:6] == [BAD_LOGITS] * 6
    alone = Sampler(8, vocab, CPU, sampling).sample(
        logits[6:], make_batch([{**rows[6], "slot": 7}, {**rows[7], "slot": 8}], penalty_resets=resets)
    )
    assert tokens[6:] == alone.tolist()
    assert 0 <= tokens[6] < 10
    assert 0 <= tokens[7] < vocab


@pytest.mark.parametrize("vocab", [4, 5000])
def test_banned_ids_are_never_sampled(vocab: int, sampling: SamplingBackend) -> None:
    logits = torch.zeros(64, vocab)
    logits[:, 2] = 9.0
    logits[:, 3] = 8.0
    rows = [{"seed": at, "temperature": at % 2, "banned": [2] if at % 4 < 2 else []} for at in range(64)]
    tokens = Sampler(64, vocab, CPU, sampling).sample(logits, make_batch(rows)).tolist()
    assert all(token != 2 for at, token in enumerate(tokens) if at % 4 < 2)
    assert tokens[0::4] == [3] * 16
    assert tokens[2::4] == [2] * 16
    all_greedy = make_batch([{"temperature": 0, "banned": [2]}, {"temperature": 0}])
    assert Sampler(2, vocab, CPU, sampling).sample(logits[:2], all_greedy).tolist() == [3, 2]
