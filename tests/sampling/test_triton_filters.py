"""Floors of top-k and top-p found by a kernel: to the bit those of a full sort."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from aioinfer.sampling.filters import mass_unit
from tests.model.kernels import interpreted_on, interpreted_only
from tests.sampling.support import DEFAULTS, reference_floor
from tests.tiers import INTERPRETER, nightly, points

triton = pytest.importorskip("triton", reason="triton is not installed")
tl = pytest.importorskip("triton.language", reason="triton is not installed")
filters = pytest.importorskip("aioinfer.sampling.triton_filters", reason="triton is not installed")
noise = pytest.importorskip("aioinfer.sampling.triton_noise", reason="triton is not installed")

VOCAB = 48


@triton.jit
def _floor_kernel(  # type: ignore[no-untyped-def]
    scaled, top_k, top_p, floors, enough, VOCAB: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    line = scaled + row * VOCAB
    peak = tl.full([], 0.0, tl.float32)
    heat = tl.full([], 1.0, tl.float32)
    none = tl.full([], float("-inf"), tl.float32)
    total = filters._mass(line, VOCAB, peak, heat, none, UNIT, TILE, WIDEN)
    count = tl.load(top_k + row)
    p = tl.load(top_p + row)
    floor, told = filters.filter_floor(line, VOCAB, peak, heat, count, p, total, UNIT, TILE, WIDEN)
    tl.store(floors + row, floor)
    tl.store(enough + row, told)


@triton.jit
def _draw_kernel(  # type: ignore[no-untyped-def]
    entries, ids, token, weight, VOCAB: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    one = tl.full([], 1.0, tl.float32)
    key = tl.full([], 7, tl.uint32)
    floor = tl.full([], -2.0, tl.float32)
    none = tl.full([], -1, tl.int32)
    _, found, mass = filters.draw(
        entries, ids, 0, VOCAB, one * 0, one, floor, key, key, none, one, none, True, False, True, UNIT, TILE,
        WIDEN,
    )  # fmt: skip
    tl.store(token, found)
    tl.store(weight, mass)


def floors_of(
    lines: npt.NDArray[np.float32], rows: list[dict[str, Any]], device: str, tile: int
) -> tuple[list[float], list[int]]:
    """Floors, and whether the entries sufficed."""
    some = [{**DEFAULTS, **row} for row in rows]
    top_k = torch.tensor([row["top_k"] for row in some], dtype=torch.int32, device=device)
    top_p = torch.tensor([row["top_p"] for row in some], device=device)
    floors, enough = torch.empty(len(rows), device=device), torch.empty_like(top_k)
    _floor_kernel[(len(rows),)](
        torch.from_numpy(lines).to(device), top_k, top_p, floors, enough,
        VOCAB=VOCAB, UNIT=mass_unit(VOCAB), TILE=tile, WIDEN=noise.INTERPRETED,
    )  # fmt: skip
    return floors.tolist(), enough.tolist()


def line_of(rng: np.random.Generator) -> npt.NDArray[np.float32]:
    """Spread out; or so close together, and to the ends of digits, that a floor a bit off meets others."""
    if rng.random() < 0.4:
        line = -np.abs(rng.normal(0, rng.choice([0.01, 1, 8]), VOCAB)).astype(np.float32)
    else:
        start = int(np.float32(rng.choice([0.25, 0.5, 1, 2, 4])).view(np.int32))
        keys = start + rng.integers(-40, 40, VOCAB) * int(rng.choice([1, 4, 1 << 12, 1 << 16]))
        keys -= rng.integers(0, 2, VOCAB)
        line = -keys.astype(np.int32).view(np.float32)
    line[rng.integers(0, VOCAB)] = 0.0
    if rng.random() < 0.2:
        line[rng.integers(0, VOCAB, 30)] = -np.inf
        line[rng.integers(0, VOCAB)] = 0.0
    return line


@nightly(INTERPRETER)
@pytest.mark.parametrize(("tile", "number"), points([(32, 12)], [(64, 24)], INTERPRETER))
def test_floors_are_those_of_a_full_sort(device: str, tile: int, number: int) -> None:
    """In one tile and in several, the last of which is partly empty."""
    rng = np.random.default_rng(tile)
    number *= 1 if interpreted_on(device) else 100
    lines = np.stack([line_of(rng) for _ in range(number)])
    kinds = [("top_k",), ("top_k",), ("top_p",), ("top_k", "top_p")]
    rows: list[dict[str, Any]] = []
    for at in range(number):
        values = {"top_k": int(rng.integers(1, VOCAB)), "top_p": float(rng.choice([0.1, 0.5, 0.9, 0.97]))}
        rows.append({name: values[name] for name in kinds[at % 4]})
    wanted = [float(reference_floor(line, row)) for line, row in zip(lines, rows, strict=True)]
    got, enough = floors_of(lines, rows, device, tile)
    assert got == wanted
    assert all(enough)


def test_tokens_alike_stay_or_go_together(device: str) -> None:
    """Whatever part of them would do; and what weighs nothing is only kept if counted."""
    line = np.full(VOCAB, -np.inf, np.float32)
    line[[3, 20, 40]], line[47] = 0.0, -200.0
    rows = [{"top_p": 1e-6}, {"top_p": 0.9999999}, {"top_k": 3, "top_p": 0.5}, {"top_k": 4}, {"top_k": 5}]
    got, _ = floors_of(np.stack([line] * 5), rows, device, 64)
    assert got == [0.0, 0.0, 0.0, -200.0, -np.inf]


def test_it_is_told_when_there_is_less_than_asked_for(device: str) -> None:
    """As in a list that is missing tokens. Entries of -inf count, as a row's tokens do."""
    lines = np.full((3, VOCAB), -1.0, np.float32)
    _, enough = floors_of(lines, [{"top_k": VOCAB}, {"top_k": VOCAB + 1}, {"top_p": 0.99}], device, 64)
    assert enough == [1, 0, 1]


@interpreted_only
@pytest.mark.parametrize("tile", [4, 64])
def test_of_equal_sums_the_lowest_id_wins_wherever_it_is_listed(
    device: str, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal sums are too rare to wait for, so there is no noise here."""
    monkeypatch.setattr(filters, "gumbel", lambda *arguments: 0.0)
    rng = np.random.default_rng(0)
    for _ in range(6):
        line = rng.integers(-4, 0, VOCAB).astype(np.float32)
        ids = rng.permutation(VOCAB).astype(np.int32)
        token, mass = torch.empty(1, dtype=torch.int32), torch.empty(1, dtype=torch.int64)
        _draw_kernel[(1,)](
            torch.from_numpy(line), torch.from_numpy(ids), token, mass,
            VOCAB=VOCAB, UNIT=mass_unit(VOCAB), TILE=tile, WIDEN=True,
        )  # fmt: skip
        assert int(token) == ids[line == line.max()].min()
        weights = np.exp(line[line >= -2].astype(np.float64)).astype(np.float32)
        assert int(mass) == sum(int(weight * mass_unit(VOCAB)) for weight in weights.tolist())
