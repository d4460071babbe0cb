"""The SDPA kernel against attention written out, on random pages; and what must not reach a row's result."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from aioinfer.model.attention import sdpa
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.heads import HeadNorm
from aioinfer.model.rope import Rotary
from tests.model.harness import build_batch

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
CAUSAL = AttentionParams(0.3)


class Bench:
    """A pool and sequences in it, with their keys and values kept in the open."""

    def __init__(self, page_size: int, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        pages = [-(-length // page_size) for length in lengths]
        self.page_size = page_size
        self.dtype = dtype
        self.pool = KVPool(
            [KVShape(KV_HEADS, HEAD_DIM)],
            num_pages=sum(pages) + 2,
            page_size=page_size,
            dtype=dtype,
            device=CPU,
        )
        free = list(range(1, sum(pages) + 3))
        random.Random(0).shuffle(free)
        self.tables = [[free.pop() for _ in range(count)] for count in pages]
        generator = torch.Generator().manual_seed(1)
        self.q, self.k, self.v = (
            [torch.randn(length, heads, HEAD_DIM, generator=generator).to(dtype) for length in lengths]
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )

    def spoil(self) -> None:
        """NaN in every cell, as requests that went wrong leave it; then sequences write their own."""
        self.pool.keys[0].fill_(float("nan"))
        self.pool.values[0].fill_(float("nan"))

    def store(self, sequence: int, stop: int) -> None:
        """Positions before ``stop`` are there from earlier steps."""
        if stop == 0:
            return
        table = self.tables[sequence]
        cells = [table[at // self.page_size] * self.page_size + at % self.page_size for at in range(stop)]
        self.pool.write(0, torch.tensor(cells), self.k[sequence][:stop], self.v[sequence][:stop])

    def attend(
        self,
        rows: Sequence[tuple[int, int, int]],
        num_decodes: int,
        params: AttentionParams = CAUSAL,
        sinks: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Rows (sequence, start, stop) in one step; the output of each."""
        for sequence, start, _ in rows:
            self.store(sequence, start)
        batch = build_batch(
            [([0] * (stop - start), start, self.tables[at]) for at, start, stop in rows],
            self.page_size,
            num_decodes=num_decodes,
        )
        q, k, v = (
            torch.cat([source[at][start:stop] for at, start, stop in rows])
            for source in (self.q, self.k, self.v)
        )
        output = SDPAAttention(self.pool)(0, q, k, v, batch, params, sinks)
        return list(output.split([stop - start for _, start, stop in rows]))

    def expected(
        self,
        row: tuple[int, int, int],
        params: AttentionParams = CAUSAL,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention as the formula says, in float64."""
        sequence, start, stop = row
        results = []
        for position in range(start, stop):
            first = 0 if params.window is None else max(0, position + 1 - params.window)
            last = min(stop, (position // params.block + 1) * params.block)
            k, v = (
                source[sequence][first:last].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
                for source in (self.k, self.v)
            )
            scores = torch.einsum("hd,nhd->hn", self.q[sequence][position].double(), k) * params.scale
            if params.soft_cap is not None:
                scores = params.soft_cap * torch.tanh(scores / params.soft_cap)
            if sinks is not None:
                scores = torch.cat((scores, sinks.double()[:, None]), 1)
            results.append(torch.einsum("hn,nhd->hd", scores.softmax(-1)[:, : len(v)], v))
        return torch.stack(results)


LENGTHS = [1, 5, 16, 33, 70]
#: three decodes, a fresh prompt of one token, a chunk
MIXED = [(1, 4, 5), (3, 32, 33), (4, 69, 70), (0, 0, 1), (2, 7, 16)]


@pytest.mark.parametrize("window", [None, 1, 4, 16, 33, 1000])
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 24])
def test_a_mixed_step_is_what_the_formula_says(page_size: int, window: int | None) -> None:
    bench, params = Bench(page_size, LENGTHS), AttentionParams(0.3, window)
    rows = MIXED
    for got, row in zip(bench.attend(rows, 3, params), rows, strict=True):
        torch.testing.assert_close(got.double(), bench.expected(row, params), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "params", [AttentionParams(0.3), AttentionParams(0.3, 6), AttentionParams(0.3, block=4)]
)
def test_sinks_take_a_share_of_the_weights(params: AttentionParams) -> None:
    """Of decodes, of a fresh prompt, of a chunk behind a context, and of blocks."""
    bench, sinks = Bench(8, LENGTHS), torch.linspace(-30, 9, HEADS)
    rows = [*MIXED[:3], (4, 0, 61), (1, 0, 4), (2, 4, 8)]
    for got, row in zip(bench.attend(rows, 3, params, sinks), rows, strict=True):
        torch.testing.assert_close(got.double(), bench.expected(row, params, sinks), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize("block", [1, 4, 5, 32, 1000])
def test_blocks_windows_and_soft_caps_are_what_the_formula_says(
    block: int, window: int | None, soft_cap: float | None
) -> None:
    """Rows begin and end within blocks and at their edges, alone in the pool and behind a context."""
    bench, params = Bench(8, LENGTHS), AttentionParams(0.3, window, soft_cap, block)
    rows = [*MIXED, (3, 0, 32), (4, 32, 64), (1, 1, 5), (4, 27, 61), (3, 3, 5)]
    for row in (rows[:3], rows[3:6], rows[6:], [rows[2], *rows[6:8]]):
        num_decodes = sum(stop - start == 1 and start > 0 for _, start, stop in row)
        for got, at in zip(bench.attend(row, num_decodes, params), row, strict=True):
            torch.testing.assert_close(got.double(), bench.expected(at, params), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "params",
    [CAUSAL, AttentionParams(0.3, 4), AttentionParams(0.3, soft_cap=0.7), AttentionParams(0.3, block=16)],
    ids=str,
)
@pytest.mark.parametrize("row", [(4, 40, 41), (4, 40, 57), (4, 0, 30)])
def test_nan_in_cells_of_others_reaches_no_other_row(
    row: tuple[int, int, int], params: AttentionParams
) -> None:
    """What a freed page holds is its last owner's; a mask alone would let 0 * NaN through."""
    bench = Bench(8, LENGTHS)
    bench.spoil()
    # With a long neighbour, so that the row's own context is padded.
    decode = row[2] - row[1] == 1
    rows = [(1, 4, 5), row] if decode else [(3, 32, 33), row]
    got = bench.attend(rows, 2 if decode else 1, params)[1]
    torch.testing.assert_close(got.double(), bench.expected(row, params), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_a_decode_has_the_same_bits_in_any_batch_and_grouping(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    lengths = [70, 3, 16, 17, 33, 50, 1, 70, 41]
    bench, params = Bench(8, lengths, dtype), AttentionParams(0.3, window)
    rows = [(at, length - 1, length) for at, length in enumerate(lengths) if length > 1]
    alone = [bench.attend([row], 1, params)[0] for row in rows]
    for limit in (1, 2000, 5000, 1 << 19):
        monkeypatch.setitem(sdpa._GROUP_LIMIT, "cpu", limit)
        for seed in range(3):
            order = list(range(len(rows)))
            random.Random(seed).shuffle(order)
            together = bench.attend([rows[at] for at in order], len(rows), params)
            for at, got in zip(order, together, strict=True):
                assert torch.equal(got, alone[at]), (limit, seed, rows[at])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_has_the_same_bits_in_any_batch_and_grouping(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks at any depth of their sequences, some of them two of one, between prompts and decodes."""
    torch.set_num_threads(1)
    bench, params = Bench(16, [96, 8, 40, 96, 16, 72, 24, 96], dtype), AttentionParams(0.3, block=8)
    rows = [(at, len(bench.q[at]) - 8, len(bench.q[at])) for at in range(8)] + [(0, 80, 88), (3, 0, 8)]
    alone = [bench.attend([row], 0, params)[0] for row in rows]
    for row, got in zip(rows, alone, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(got.double(), bench.expected(row, params), rtol=1e-5, atol=1e-5)
    others = [(5, 0, 64), (2, 16, 32), (6, 15, 16), (4, 7, 8)]
    for limit in (1, 20_000, 50_000, 1 << 19):
        monkeypatch.setitem(sdpa._GROUP_LIMIT, "cpu", limit)
        for seed in range(3):
            order = random.Random(seed).sample([*rows, *others], len(rows) + len(others))
            for row, got in zip(order, bench.attend(order, 0, params), strict=True):
                if row in rows:
                    assert torch.equal(got, alone[rows.index(row)]), (limit, seed, row)


def test_what_a_projection_holds_is_normed_rotated_and_stored() -> None:
    """Heads that the model hands over unprepared give what prepared ones give, with the same bits."""
    bench = Bench(8, LENGTHS)
    batch = build_batch([([0] * 16, 0, bench.tables[2])], 8, num_decodes=0)
    generator = torch.Generator().manual_seed(2)
    qkv, weight, cos, sin = (
        torch.randn(*shape, HEAD_DIM, generator=generator)
        for shape in ((16, HEADS + 2 * KV_HEADS), (HEADS + KV_HEADS,), (16, 1), (16, 1))
    )
    for norm in (None, HeadNorm(weight, 1e-6)):
        got = SDPAAttention(bench.pool).fused(0, qkv, norm, Rotary(cos, sin), batch, CAUSAL)
        qk = qkv[:, : HEADS + KV_HEADS]
        if norm is not None:
            qk = qk * torch.rsqrt(qk.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
        qk = qk * cos + torch.cat((qk[..., HEAD_DIM // 2 :], qk[..., : HEAD_DIM // 2]), -1) * sin
        q, k, v = qk[:, :HEADS], qk[:, HEADS:], qkv[:, HEADS + KV_HEADS :]
        for store, wanted in ((bench.pool.key_cells[0], k), (bench.pool.value_cells[0], v)):
            assert torch.equal(store[batch.slot_mapping], wanted)
        assert torch.equal(got, SDPAAttention(bench.pool)(0, q, k, v, batch, CAUSAL))


@pytest.mark.parametrize("window", [None, 6])
def test_shared_keys_and_values_are_read_and_not_written(window: int | None) -> None:
    """Queries alone, normed and rotated, attend to what another layer has written in the same step."""
    bench, rows = Bench(8, LENGTHS), [*MIXED, (4, 0, 30)][1:]
    params = AttentionParams(0.3, window)
    wanted = torch.cat(bench.attend(rows, 2, params))
    batch = build_batch(
        [([0] * (stop - start), start, bench.tables[at]) for at, start, stop in rows], 8, num_decodes=2
    )
    before = bench.pool.keys[0].clone(), bench.pool.values[0].clone()
    batch.slot_mapping.fill_(0)
    q = torch.cat([bench.q[at][start:stop] for at, start, stop in rows])
    shared = params._replace(shared=True)
    got = SDPAAttention(bench.pool).fused(0, q, None, None, batch, shared)
    torch.testing.assert_close(got, wanted)
    assert torch.equal(bench.pool.keys[0], before[0])
    assert torch.equal(bench.pool.values[0], before[1])
    size = torch.full((HEADS, HEAD_DIM), 0.5)
    normed = SDPAAttention(bench.pool).fused(0, q, HeadNorm(size, 1e-6), None, batch, shared)
    again = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6) * 0.5
    plain = SDPAAttention(bench.pool).fused(0, again, None, None, batch, shared)
    torch.testing.assert_close(normed, plain)


def test_grouping_covers_each_row_once_and_bounds_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sdpa._GROUP_LIMIT, "cpu", 1000)
    contexts = [random.Random(3).randint(1, 200) for _ in range(40)]
    groups = sdpa._groups(contexts, 4, "cpu")
    rows = [row for group, _ in groups for row in group]
    assert sorted(rows) == list(range(40))
    for group, context in groups:
        assert context % 16 == 0
        assert max(contexts[row] for row in group) <= context
        assert len(group) == 1 or len(group) * context * 4 <= 1000
    assert sdpa._groups([], 4, "cpu") == []


def test_a_gather_too_large_for_the_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_SCRATCH_LIMIT", 40)
    test_a_mixed_step_is_what_the_formula_says(8, None)


def test_bytes_per_page_is_what_a_page_takes() -> None:
    layers, dtype = (KVShape(2, 8), KVShape(1, 24), KVShape(2, 8)), torch.bfloat16
    pools = [KVPool(layers, num_pages=count, page_size=4, dtype=dtype, device=CPU) for count in (5, 6)]
    small, large = (sum(t.nbytes for t in pool.keys + pool.values) for pool in pools)
    assert large - small == KVPool.bytes_per_page(layers, 4, dtype)
