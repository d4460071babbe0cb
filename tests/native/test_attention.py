"""Native attention against the formula in float64, over pools full of NaN."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from aioinfer.model.attention.base import AttentionParams
from tests.native.support import DTYPES, UNIT, Bench, Heads, Row, draw_rows, expected, normal
from tests.tiers import SECONDS, grid, rest

PAGE_SIZES = [1, 3, 8, 16, 32, 48]


def check(heads: Heads, rows: list[Row], found: list[torch.Tensor], *, fused: bool) -> None:
    """float32 to 1e-5. bfloat16 rounds weights and results, once each; ``fused`` also queries and keys, whose
    bound is looser than their likely error."""
    for row, got in zip(rows, found, strict=True):
        wanted, absolute = expected(heads, row, fused=fused)
        unit = UNIT[heads.dtype]
        bound = 1e-5 * (1 + absolute)
        if heads.dtype == torch.bfloat16:
            bound += unit * (1 + unit) * (absolute + wanted.abs())
            bound += 3e-2 if fused else 0.0
        wrong = ~((got.double() - wanted).abs() <= bound)
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, {heads}, {len(row.qkv)}, {row.start}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", grid(range(16), range(16, 48)))
def test_random_heads_rows_and_pages(seed: int, dtype: torch.dtype) -> None:
    rng = random.Random(seed)
    heads = Heads.draw(rng, dtype)
    rows = draw_rows(rng, heads, rng.randint(1, 4))
    bench = Bench(heads, PAGE_SIZES[seed % 6], threads=1 + seed % 3, seed=seed)
    check(heads, rows, bench.run(rows, fused=seed % 4 > 0), fused=seed % 4 > 0)


@rest(SECONDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [3, 16])
def test_every_length_of_a_context_up_to_two_stretches(page_size: int, dtype: torch.dtype) -> None:
    """With an odd length half a unit of bfloat16 is NaN."""
    heads = Heads(2, 1, 16, dtype, AttentionParams(0.25))
    rows = [Row(normal(length, 4, 16, seed=length, dtype=dtype), length - 1) for length in range(1, 260)]
    found = []
    for at in range(0, len(rows), 16):
        found += Bench(heads, page_size, seed=at).run(rows[at : at + 16], fused=False)
    check(heads, rows, found, fused=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 128, 130])
def test_every_edge_of_a_window(window: int, dtype: torch.dtype) -> None:
    heads = Heads(4, 2, 32, dtype, AttentionParams(0.3, window=window))
    rows = [Row(normal(length, 8, 32, seed=length, dtype=dtype), 0) for length in (1, window, 150, 290)]
    check(heads, rows, Bench(heads, 16).run(rows, fused=False), fused=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [2, 3, 8, 32, 100])
def test_blocks_see_to_their_ends_and_rows_of_one_sequence_each_other(block: int, dtype: torch.dtype) -> None:
    """The last three blocks of a sequence as separate rows: each sees those before it."""
    heads = Heads(4, 2, 32, dtype, AttentionParams(0.3, block=block))
    length = 5 * block
    (row,) = rows = [Row(normal(length, 8, 32, seed=block, dtype=dtype), 2 * block)]
    bench = Bench(heads, 16)
    bench.deal(rows)
    bench.past(rows, fused=False)
    parts = [(row, at * block, (at + 1) * block) for at in (2, 3, 4)]
    check(heads, rows, [torch.cat(bench.step(parts, fused=False))], fused=False)


@rest(SECONDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", grid([32], [3]))
@pytest.mark.parametrize(
    "scoring",
    [AttentionParams(0.1), AttentionParams(0.1, window=200), AttentionParams(0.1, block=32)],
    ids=["causal", "window", "blocks"],
)
def test_queries_that_read_a_long_context_together_have_the_bits_of_each_alone(
    scoring: AttentionParams, page_size: int, dtype: torch.dtype
) -> None:
    """Keys and values beyond a core's cache: blocks of queries go through a stretch side by side."""
    heads = Heads(6, 2, 256, dtype, scoring)
    (row,) = rows = [Row(normal(1100, 10, 256, seed=1, dtype=dtype), 0)]
    apart = Bench(heads, page_size, threads=2)
    apart.deal(rows)
    parts = [apart.step([(row, at, at + 32)], fused=False)[0] for at in range(0, 1088, 32)]
    parts += apart.step([(row, 1088, 1100)], fused=False)
    whole = torch.cat(parts)
    for threads in (1, 2, 7):
        bench = Bench(heads, page_size, threads=threads, seed=threads)
        bench.deal(rows)
        assert torch.equal(bench.step([(row, 0, 1100)], fused=False)[0], whole), threads
    check(heads, rows, [whole], fused=False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 30.0, -30.0])
def test_scores_of_any_size(scale: float, dtype: torch.dtype) -> None:
    """With scores of hundreds one weight is not 0; with scores of 0 all weights are equal."""
    heads = Heads(2, 2, 64, dtype, AttentionParams(scale))
    rows = [Row(normal(200, 6, 64, seed=1, dtype=dtype), 0)]
    (got,) = Bench(heads, 16).run(rows, fused=False)
    wanted, absolute = expected(heads, rows[0], fused=False)
    # A score of float32 is off by a few units of its size, and so is the logarithm of a weight.
    bound = 2e-5 * (1 + absolute) * max(1.0, abs(scale)) + 2 * UNIT[dtype] * (absolute + wanted.abs())
    assert ((got.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_row_stays_in_that_row(dtype: torch.dtype) -> None:
    heads = Heads(4, 2, 32, dtype, AttentionParams(0.2), rotary_dim=32)
    rows = [Row(normal(40, 8, 32, seed=at, dtype=dtype), 20) for at in range(3)]
    rows[1].qkv[:] = float("nan")
    found = Bench(heads, 16).run(rows)
    assert found[1].isnan().all()
    check(heads, rows[::2], found[::2], fused=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [1, 4, 16], ids=lambda group: f"group {group}")
@pytest.mark.parametrize("page_size", [3, 16])
@pytest.mark.parametrize(
    "scoring",
    [
        AttentionParams(0.2),
        AttentionParams(0.2, window=20),
        AttentionParams(0.2, block=8),
        AttentionParams(0.2, soft_cap=3.0),
    ],
    ids=["causal", "window", "blocks", "soft cap"],
)
def test_what_is_not_finite_reaches_those_alone_who_see_its_position(
    scoring: AttentionParams, page_size: int, group: int, dtype: torch.dtype
) -> None:
    """One key or value of one position: as a whole prompt, by chunks, and of a few tokens as drafts are."""
    heads = Heads(2 * group, 2, 48, dtype, scoring)
    length, lanes = 150, normal(8, seed=3).abs().argsort().tolist()
    clean = normal(length, heads.width, 48, seed=1, dtype=dtype)
    own, key = torch.arange(length)[:, None], torch.arange(length)
    visible = key < (own // scoring.block + 1) * scoring.block
    if scoring.window is not None:
        visible &= key > own - scoring.window
    for number, bad in enumerate([0, 9, 22, 71, 127, 128, 149]):
        spoilt = clean.clone()
        head = 2 * group + 2 * (number % 3 > 0) + number % 2
        value = [float("inf"), float("nan"), float("-inf")][number % 3]
        spoilt[bad, head, lanes[number]] = value
        if number % 3 == 0:
            spoilt[bad, head] = value = float("nan")
        blind, seeing = ~visible[:, bad], visible[:, bad]
        at = bad // 8 * 8
        for cuts in ([0, length], [0, at, min(at + 8, length), length], [0, 40, 80, length]):
            found = []
            for qkv in (clean, spoilt):
                row, bench = Row(qkv, 0), Bench(heads, page_size)
                bench.deal([row])
                pairs = [(one, other) for one, other in pairwise(cuts) if one < other]
                found.append(torch.cat([bench.step([(row, *pair)], fused=False)[0] for pair in pairs]))
            assert torch.equal(found[1][blind], found[0][blind]), (bad, cuts)
            assert not found[1][seeing].flatten(1).isfinite().all(1).any(), (bad, cuts)


def test_a_step_without_rows_does_nothing() -> None:
    heads = Heads(4, 2, 32, torch.float32, AttentionParams(0.2), rotary_dim=32)
    bench = Bench(heads, 16)
    row = Row(normal(40, 8, 32, seed=1), 0)
    bench.deal([row])
    batch = bench.batch([(row, 0, 1)])
    none = torch.zeros(0, dtype=torch.int64)
    batch.positions = batch.slot_mapping = batch.kv_len = batch.input_ids = none
    batch.cu_q, batch.q_lens, batch.kv_lens = torch.zeros(1, dtype=torch.int64), [], []
    rotary = heads.rotary(none)
    got = bench.attention.fused(0, row.qkv[:0], None, rotary, batch, heads.scoring)
    assert got.shape == (0, 4, 32)
    assert all(cells.isnan().all() for cells in bench.attention._cells)
