"""The SDPA kernel against attention written out, on random pages; and what must not reach a row's result."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from aioinfer.model.attention import sdpa
from aioinfer.model.attention.pool import KVPool
from aioinfer.model.attention.sdpa import SDPAAttention
from tests.model.harness import build_batch

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 6, 2, 16
SCALE = 0.3


class Bench:
    """A pool and sequences in it, with their keys and values kept in the open."""

    def __init__(self, page_size: int, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> None:
        pages = [-(-length // page_size) for length in lengths]
        self.page_size = page_size
        self.dtype = dtype
        self.pool = KVPool(
            num_layers=1,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
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
        self, rows: Sequence[tuple[int, int, int]], num_decodes: int, window: int | None = None
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
        output = SDPAAttention(self.pool)(0, q, k, v, batch, scale=SCALE, window=window)
        return list(output.split([stop - start for _, start, stop in rows]))

    def expected(self, row: tuple[int, int, int], window: int | None = None) -> torch.Tensor:
        """Attention as the formula says, in float64."""
        sequence, start, stop = row
        results = []
        for position in range(start, stop):
            first = 0 if window is None else max(0, position + 1 - window)
            k, v = (
                source[sequence][first : position + 1].double().repeat_interleave(HEADS // KV_HEADS, dim=1)
                for source in (self.k, self.v)
            )
            scores = torch.einsum("hd,nhd->hn", self.q[sequence][position].double(), k) * SCALE
            results.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), v))
        return torch.stack(results)


LENGTHS = [1, 5, 16, 33, 70]
#: three decodes, a fresh prompt of one token, a chunk
MIXED = [(1, 4, 5), (3, 32, 33), (4, 69, 70), (0, 0, 1), (2, 7, 16)]


@pytest.mark.parametrize("window", [None, 1, 4, 16, 33, 1000])
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 24])
def test_a_mixed_step_is_what_the_formula_says(page_size: int, window: int | None) -> None:
    bench = Bench(page_size, LENGTHS)
    rows = MIXED
    for got, row in zip(bench.attend(rows, 3, window), rows, strict=True):
        torch.testing.assert_close(got.double(), bench.expected(row, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("row", [(4, 40, 41), (4, 40, 57), (4, 0, 30)])
def test_nan_in_cells_of_others_reaches_nobody(row: tuple[int, int, int], window: int | None) -> None:
    """What a freed page holds is its last owner's; a mask alone would let 0 * NaN through."""
    bench = Bench(8, LENGTHS)
    bench.spoil()
    # With a long neighbour, so that the row's own context is padded.
    decode = row[2] - row[1] == 1
    rows = [(1, 4, 5), row] if decode else [(3, 32, 33), row]
    got = bench.attend(rows, 2 if decode else 1, window)[1]
    torch.testing.assert_close(got.double(), bench.expected(row, window), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_a_decode_has_the_same_bits_in_any_company_and_grouping(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.set_num_threads(1)
    lengths = [70, 3, 16, 17, 33, 50, 1, 70, 41]
    bench = Bench(8, lengths, dtype)
    rows = [(at, length - 1, length) for at, length in enumerate(lengths) if length > 1]
    alone = [bench.attend([row], 1, window)[0] for row in rows]
    for limit in (1, 2000, 5000, 1 << 19):
        monkeypatch.setitem(sdpa._GROUP_LIMIT, "cpu", limit)
        for seed in range(3):
            order = list(range(len(rows)))
            random.Random(seed).shuffle(order)
            together = bench.attend([rows[at] for at in order], len(rows), window)
            for at, got in zip(order, together, strict=True):
                assert torch.equal(got, alone[at]), (limit, seed, rows[at])


def test_grouping_covers_each_row_once_and_bounds_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sdpa._GROUP_LIMIT, "cpu", 1000)
    contexts = [random.Random(3).randint(1, 200) for _ in range(40)]
    groups = sdpa._groups(contexts, 4, "cpu")
    rows = [row for group, _, _ in groups for row in group]  # type: ignore[union-attr]
    assert sorted(rows) == list(range(40))
    for group, count, context in groups:
        assert count == len(group)  # type: ignore[arg-type]
        assert context % 16 == 0
        assert max(contexts[row] for row in group) <= context  # type: ignore[union-attr]
        assert len(group) == 1 or len(group) * context * 4 <= 1000  # type: ignore[arg-type]
    assert sdpa._groups([], 4, "cpu") == []


def test_a_gather_too_large_for_the_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_SCRATCH_LIMIT", 40)
    test_a_mixed_step_is_what_the_formula_says(8, None)


def test_bytes_per_page_is_what_a_page_takes() -> None:
    shape = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "page_size": 4, "dtype": torch.bfloat16}
    pools = [KVPool(num_pages=count, device=CPU, **shape) for count in (5, 6)]
    small, large = (sum(t.nbytes for t in pool.keys + pool.values) for pool in pools)
    assert large - small == KVPool.bytes_per_page(**shape)
