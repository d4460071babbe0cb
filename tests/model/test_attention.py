"""The SDPA kernel against attention written out, on random pages; and what must not reach a row's result."""

from __future__ import annotations

import math
import random

import pytest
import torch

from aioinfer.model.attention import sdpa
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVPool, KVScales, KVShape
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.heads import HeadNorm
from aioinfer.model.rope import Rotary
from tests.model.kernels import Problem, Setup, normal

CAUSAL = AttentionParams(0.3)
#: (q_len, kv_len): three decodes, a fresh prompt of one token, a chunk
MIXED = [(1, 5), (1, 33), (1, 70), (1, 1), (9, 16)]
#: blocks at some depth of their sequences, and rows that begin and end within one
BLOCKS = [(32, 64), (32, 32), (34, 61), (4, 5), (4, 8), (2, 5)]


def setup(
    rows: list[tuple[int, int]], decodes: int, *, heads: int = 6, page_size: int = 8, **changes: object
) -> Setup:
    """A step among cells that hold NaN, as requests that went wrong leave them. A number of heads that 3
    divides: with sinks."""
    shape = {"heads": heads, "kv_heads": 2, "head_dim": 16, "page_size": page_size, **changes}
    return Setup(Problem.make(rows, **shape), decodes)  # type: ignore[arg-type]


def attend(step: Setup, params: AttentionParams) -> torch.Tensor:
    return step.run(SDPAAttention(step.pool()), params)


def check(step: Setup, params: AttentionParams, got: torch.Tensor | None = None) -> None:
    """The result of a step, or ``got``, is what the formula says."""
    scale, window, soft_cap, block, *_ = params
    expected = step.task.expected(scale, window=window, soft_cap=soft_cap, block=block, sinks=step.sinks)
    got = attend(step, params) if got is None else got
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("window", [None, 1, 4, 16, 33, 1000])
@pytest.mark.parametrize("page_size", [1, 3, 8, 16, 24])
def test_a_mixed_step_is_what_the_formula_says(page_size: int, window: int | None, heads: int) -> None:
    check(setup(MIXED, 3, heads=heads, page_size=page_size), AttentionParams(0.3, window))


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("soft_cap", [None, 0.7])
@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize("block", [1, 4, 5, 32, 1000])
def test_blocks_windows_and_soft_caps_are_what_the_formula_says(
    block: int, window: int | None, soft_cap: float | None, heads: int
) -> None:
    params = AttentionParams(0.3, window, soft_cap, block)
    for rows, decodes in ((MIXED, 3), (BLOCKS, 0), ([*MIXED[:2], *BLOCKS], 2)):
        check(setup(rows, decodes, heads=heads), params)


def same_bits(
    monkeypatch: pytest.MonkeyPatch, task: Problem, rows: int, decodes: int, params: AttentionParams
) -> None:
    """The first rows of a problem have the bits of each alone, among any of the others."""
    torch.set_num_threads(1)
    alone = [attend(Setup(task.part(row), min(decodes, 1)), params) for row in range(rows)]
    for limit in (1, 2000, 20_000, 1 << 19):
        monkeypatch.setitem(sdpa._GROUP_LIMIT, "cpu", limit)
        for seed in range(3):
            order = random.Random(seed).sample(range(len(task.q_lens)), len(task.q_lens))
            step = Setup(task.some(order), decodes)
            for row, got in zip(order, attend(step, params).split(step.task.q_lens), strict=True):
                assert row >= rows or torch.equal(got, alone[row]), (limit, seed, row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 20])
def test_a_decode_has_the_same_bits_in_any_batch_and_grouping(
    dtype: torch.dtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(1, length) for length in (70, 3, 16, 17, 33, 50, 70, 41)]
    step = setup(rows, 8, heads=4, dtype=dtype)
    same_bits(monkeypatch, step.task, 8, 8, AttentionParams(0.3, window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_has_the_same_bits_in_any_batch_and_grouping(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks at any depth of their sequences, between prompts and decodes."""
    rows = [(8, length) for length in (96, 8, 40, 96, 16, 72, 24, 88)]
    step = setup([*rows, (64, 64), (16, 32), (1, 16), (1, 8)], 0, heads=4, page_size=16, dtype=dtype)
    same_bits(monkeypatch, step.task, 8, 0, AttentionParams(0.3, block=8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize(
    "params",
    [CAUSAL, CAUSAL._replace(window=9), CAUSAL._replace(block=8), CAUSAL._replace(soft_cap=0.7)],
    ids=["causal", "window", "blocks", "soft cap"],
)
@pytest.mark.parametrize("start", [0, 24])
def test_what_is_not_finite_reaches_those_alone_who_see_its_position(
    start: int, params: AttentionParams, heads: int, dtype: torch.dtype
) -> None:
    """One key or value of a chunk, behind a context and without one."""
    torch.set_num_threads(1)
    clean = attend(setup([(40, start + 40), (1, 1)], 0, heads=heads, dtype=dtype), params)
    own = torch.arange(start, start + 40)
    for bad, value in ((0, float("inf")), (13, float("nan")), (39, float("-inf"))):
        seeing = start + bad < (own // params.block + 1) * params.block
        if params.window is not None:
            seeing &= start + bad > own - params.window
        for kept in ("k", "v"):
            step = setup([(40, start + 40), (1, 1)], 0, heads=heads, dtype=dtype)
            getattr(step, kept)[bad, 1, 5 if kept == "v" else slice(None)] = (
                math.nan if kept == "k" else value
            )
            got = attend(step, params)
            blind = torch.cat((~seeing, torch.tensor([True])))
            assert torch.equal(got[blind], clean[blind]), (bad, kept)
            assert not got[~blind].flatten(1).isfinite().all(1).any(), (bad, kept)


def test_what_a_projection_holds_is_normed_rotated_and_stored() -> None:
    """Heads that the model hands over unprepared give what prepared ones give, with the same bits."""
    step = setup([(16, 16)], 0)
    batch, qkv = step.batch(), normal(16, 10, 16, seed=2)
    weight, cos, sin = (normal(count, heads, 16, seed=3) for count, heads in ((8, 1), (16, 1), (16, 1)))
    for norm in (None, HeadNorm(weight[:, 0], 1e-6)):
        pool = step.pool()
        got = SDPAAttention(pool).fused(1, qkv, norm, Rotary(cos, sin), batch, CAUSAL)
        qk = qkv[:, :8]
        if norm is not None:
            qk = qk * torch.rsqrt(qk.pow(2).mean(-1, keepdim=True) + 1e-6) * norm.weight
        qk = qk * cos + torch.cat((qk[..., 8:], qk[..., :8]), -1) * sin
        q, k, v = qk[:, :6], qk[:, 6:], qkv[:, 8:]
        for store, wanted in ((pool.key_cells[1], k), (pool.value_cells[1], v)):
            assert torch.equal(store[batch.slot_mapping], wanted)
        assert torch.equal(got, SDPAAttention(pool)(1, q, k, v, batch, CAUSAL))


@pytest.mark.parametrize("window", [None, 6])
def test_shared_keys_and_values_are_read_and_not_written(window: int | None) -> None:
    """Queries alone, normed and rotated, attend to what another layer has written in the same step."""
    params = AttentionParams(0.3, window)
    step = setup([(1, 33), (1, 70), (1, 1), (9, 16), (30, 30)], 2, heads=4)
    pool = step.pool()
    wanted = step.run(SDPAAttention(pool), params)
    before = [each.clone() for each in (*pool.keys, *pool.values)]
    batch, shared = step.batch(), params._replace(shared=True)
    batch.slot_mapping = torch.zeros_like(batch.slot_mapping)
    got = SDPAAttention(pool).fused(1, step.task.q, None, None, batch, shared)
    torch.testing.assert_close(got, wanted)
    for old, new in zip(before, (*pool.keys, *pool.values), strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0, equal_nan=True)
    norm = HeadNorm(torch.full((4, 16), 0.5), 1e-6)
    normed = SDPAAttention(pool).fused(1, step.task.q, norm, None, batch, shared)
    again = step.task.q * torch.rsqrt(step.task.q.pow(2).mean(-1, keepdim=True) + 1e-6) * 0.5
    torch.testing.assert_close(normed, SDPAAttention(pool).fused(1, again, None, None, batch, shared))


def test_grouping_covers_each_row_once_and_bounds_what_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sdpa._GROUP_LIMIT, "cpu", 1000)
    contexts = [random.Random(3).randint(1, 200) for _ in range(40)]
    groups = sdpa._groups(contexts, 4, "cpu")
    assert sorted(row for group, _ in groups for row in group) == list(range(40))
    for group, context in groups:
        assert context % 16 == 0
        assert max(contexts[row] for row in group) <= context
        assert len(group) == 1 or len(group) * context * 4 <= 1000
    assert sdpa._groups([], 4, "cpu") == []


def test_a_gather_too_large_for_the_scratch_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "_SCRATCH_LIMIT", 40)
    check(setup(MIXED, 3), CAUSAL)


@pytest.mark.parametrize("float8", [False, True])
def test_bytes_per_page_is_what_a_page_takes(float8: bool) -> None:
    layers, shape = (KVShape(2, 8), KVShape(1, 24), KVShape(2, 8)), {"page_size": 4, "dtype": torch.bfloat16}
    sizes = []
    for count in (5, 6):
        pool = KVPool(layers, num_pages=count, device=torch.device("cpu"), float8=float8, **shape)  # type: ignore[arg-type]
        stores = (*pool.keys, *pool.values, *pool.key_scales, *pool.value_scales)
        sizes.append(sum(each.nbytes for each in stores))
        assert isinstance(pool.scales(0), KVScales if float8 else type(None))
    assert sizes[1] - sizes[0] == KVPool.bytes_per_page(layers, 4, torch.bfloat16, float8=float8)
