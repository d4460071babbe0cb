"""Attention in which the tokens of an image see each other both ways: native and torch's, against the formula
in float64, and that a row's bits are its own."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.attention.sdpa import SDPAAttention
from tests.native.support import DTYPES, Bench, Heads, Row, expected, normal
from tests.native.test_attention import check
from tests.tiers import grid

WINDOWS = [None, 5, 40, 130]


def draw_spans(rng: random.Random, length: int) -> list[tuple[int, int]]:
    """Spans of up to 150 positions, some side by side."""
    spans, at = [], rng.choice([0, 3, 20])
    while at < length:
        stop = min(length, at + rng.choice([1, 4, 17, 64, 150]))
        spans.append((at, stop))
        at = stop + rng.choice([0, 1, 2, 30, 90])
    return spans


def draw_row(rng: random.Random, heads: Heads, length: int, *, spans: bool = True) -> Row:
    """A prompt that begins in front of a span, or between two."""
    seed = rng.randrange(1 << 30)
    qkv = normal(length, heads.width, heads.head_dim, seed=seed, dtype=heads.dtype)
    row = Row(qkv, 0, spans=draw_spans(rng, length) if spans else ())
    row.start = rng.choice(cuts(row)[:-1])
    return row


def cuts(row: Row) -> list[int]:
    """Where a chunk may end."""
    inside = {at for start, stop in row.spans for at in range(start + 1, stop)}
    return [at for at in range(len(row.qkv) + 1) if at not in inside]


def chunked(bench: Bench, row: Row, rng: random.Random) -> torch.Tensor:
    bench.deal([row])
    bench.past([row])
    allowed = [at for at in cuts(row) if row.start < at < len(row.qkv)]
    chosen = sorted(rng.sample(allowed, min(len(allowed), rng.choice([1, 4, 1000]))))
    return torch.cat([bench.step([(row, *pair)])[0] for pair in pairwise([row.start, *chosen, len(row.qkv)])])


def heads_of(rng: random.Random, dtype: torch.dtype, window: int | None) -> Heads:
    heads = Heads.draw(rng, dtype)
    heads.scoring = heads.scoring._replace(window=window, block=1, spans=True)
    return heads


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("seed", grid(range(2), range(2, 10)))
def test_spans_are_what_the_formula_says_with_the_same_bits_by_any_chunks(
    seed: int, window: int | None, dtype: torch.dtype
) -> None:
    rng = random.Random(seed)
    heads = heads_of(rng, dtype, window)
    rows = [draw_row(rng, heads, rng.choice([30, 150, 300]), spans=spans) for spans in (True, False, True)]
    found = Bench(heads, 16, threads=1 + seed % 3).run(rows)
    check(heads, rows, found, fused=True)
    for page_size in (3, 32):
        for row, wanted in zip(rows, found, strict=True):
            assert torch.equal(chunked(Bench(heads, page_size), row, rng), wanted), page_size


@pytest.mark.parametrize("dtype", DTYPES)
def test_layers_without_spans_do_not_regard_them(dtype: torch.dtype) -> None:
    rng = random.Random(0)
    heads = heads_of(rng, dtype, None)
    heads.scoring = heads.scoring._replace(spans=False)
    row = draw_row(rng, heads, 200)
    plain = Row(row.qkv, row.start)
    assert torch.equal(*Bench(heads, 16).run([row]), *Bench(heads, 16).run([plain]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [2, 32])
def test_what_is_not_finite_reaches_those_alone_who_see_its_position(heads: int, dtype: torch.dtype) -> None:
    spans = [(9, 30), (60, 75), (110, 150)]
    shape = Heads(heads, 2, 48, dtype, AttentionParams(0.2, window=50, spans=True))
    clean = normal(150, shape.width, 48, seed=1, dtype=dtype)
    own, key = torch.arange(150)[:, None], torch.arange(150)
    visible = (key < Row(clean, 0, spans=spans).ends[:, None]) & (key > own - 50)
    for bad in (0, 8, 9, 29, 30, 71, 128, 149):
        spoilt = clean.clone()
        spoilt[bad, heads + 2 * (bad % 2)] = float("nan")
        for at in ([0, 150], [0, 60, 100, 150]):
            found = []
            for qkv in (clean, spoilt):
                row, bench = Row(qkv, 0, spans=spans), Bench(shape, 16)
                bench.deal([row])
                found.append(torch.cat([bench.step([(row, *pair)], fused=False)[0] for pair in pairwise(at)]))
            group = heads // 2
            blind = ~visible[:, bad]
            assert torch.equal(found[1][blind], found[0][blind]), (bad, at)
            assert found[1][~blind][:, :group].isnan().any(-1).all(), (bad, at)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("shared", [False, True])
def test_torch_computes_spans_as_the_formula_says(shared: bool, window: int | None) -> None:
    """Rows of both kinds side by side: those without spans have the bits that they have alone."""
    rng = random.Random(window or 0)
    heads = Heads(4, 2, 32, torch.float32, AttentionParams(0.3, window=window, spans=True))
    rows = [draw_row(rng, heads, 150, spans=spans) for spans in (True, False, True, False)]
    for row in rows:
        row.start = rng.choice([0, row.start])
    bench = Bench(heads, 16)
    bench.deal(rows)

    def run(some: list[Row]) -> list[torch.Tensor]:
        pool = KVPool(
            [KVShape(2, 32)], num_pages=332, page_size=16, dtype=torch.float32,
            device=torch.device("cpu"),
        )  # fmt: skip
        bench.attention = SDPAAttention(pool)  # type: ignore[assignment]
        bench.past(some, fused=False)
        parts = [(row, row.start, len(row.qkv)) for row in some]
        written = bench.step(parts, fused=False)
        if not shared:
            return written
        batch, scoring = bench.batch(parts), heads.scoring._replace(shared=True)
        q = torch.cat([row.qkv[row.start :, :4] for row in some])
        found = bench.attention.fused(0, q, None, None, batch, scoring)
        return list(found.split([len(each) for each in written]))

    found = run(rows)
    for row, got in zip(rows, found, strict=True):
        wanted, _ = expected(heads, row, fused=False)
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(*run([row]), got)
