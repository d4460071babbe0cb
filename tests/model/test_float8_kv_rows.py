"""Keys and values of 8 bits in rows of every kind: divided keys, deterministic rows, captured steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.model.attention.base import AttentionParams
from tests.model.kernels import TOLERANCE, Problem, assert_close, matmul_by_rows
from tests.model.test_float8_kv import float8_pool
from tests.model.test_triton_attention import Setup
from tests.tiers import INTERPRETER, grid, nightly, points

#: (q_len, kv_len): a decode, padding rows, a chunk, a whole prompt
ROWS = [(1, 37), (20, 145), (2, 0), (0, 0), (9, 9)]


def prefill(task: Problem, pool: Any, **options: Any) -> torch.Tensor:
    """Over the pool of 8 bits of a problem."""
    from aioinfer.model.attention.triton_prefill import paged_prefill

    return paged_prefill(
        task.q, pool.keys[-1], pool.values[-1], task.block_table, task.cu_q, task.kv_len,
        scales=pool.scales(len(pool.keys) - 1), **{"num_tokens": len(task.q), **options},
    )  # fmt: skip


@nightly(INTERPRETER)
@pytest.mark.parametrize(
    ("head_dim", "page_size", "options", "dtype"),
    [
        (32, 64, {"window": 40, "soft_cap": 20.0}, torch.bfloat16),
        (80, 64, {"window": 40, "soft_cap": 20.0}, torch.float16),
        (64, 16, {"block": 8}, torch.float16),
        (64, 24, {"window": 100}, torch.bfloat16),
        (96, 16, {}, torch.bfloat16),
        (128, 64, {"window": 1}, torch.float32),
        (128, 64, {"block": 32, "window": 50}, torch.bfloat16),
        (256, 64, {"soft_cap": 3.0}, torch.bfloat16),
        (256, 16, {}, torch.float16),
    ],
)
def test_divided_keys_of_8_bits_are_those_that_are_stored(
    device: str, head_dim: int, page_size: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """With the tiles that a model gets; among more programs than there are tiles of keys, too."""
    from aioinfer.model.attention.triton_prefill import PrefillTuning

    task = Problem.make(
        ROWS, heads=6, kv_heads=2, head_dim=head_dim, page_size=page_size, dtype=dtype, device=device,
        window=options.get("window"),
    )  # fmt: skip
    pool, scale = float8_pool(task), head_dim**-0.5
    tuning = PrefillTuning.of_float8(head_dim, dtype)
    sinks = torch.linspace(-3, 3, 6, device=device)
    for splits, given in ((1, {}), (4, {"sinks": sinks})):
        got = prefill(task, pool, scale=scale, tuning=tuning, splits=splits, **options, **given)
        assert_close(got, task.expected(scale, **options, **given), dtype)


@nightly(INTERPRETER)
@pytest.mark.parametrize("window", [None, 18])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_token_of_8_bits_has_the_same_bits_as_decode_and_as_prefill(
    device: str, window: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a deterministic engine."""
    from aioinfer.model.attention.triton_attention import TritonAttention

    if device == "cpu":
        monkeypatch.setattr(np, "matmul", matmul_by_rows)
    rows = [(1, 137), (3, 3), (9, 75)]
    task = Problem.make(
        rows, heads=4, kv_heads=2, head_dim=32, page_size=16, device=device, window=window, dtype=dtype
    )
    pool, params = float8_pool(task, layers=2), AttentionParams(0.3, window)
    together = Setup(task, 1).run(TritonAttention(pool, invariant=True), params)
    assert_close(together, task.expected(0.3, window=window), dtype)
    for row, (q_len, kv_len) in enumerate(rows):
        begin = int(task.cu_q[row])
        for size in (1, 7):
            for at in range(0, q_len, size):
                end = min(at + size, q_len)
                length = kv_len - q_len + end
                part = Problem(
                    task.q[begin + at : begin + end], task.keys, task.values, task.block_table[row : row + 1],
                    *(torch.tensor(values, device=device) for values in ([0, end - at], [length])),
                    [end - at], [length],
                )  # fmt: skip
                alone = Setup(part, int(size == 1))
                got = alone.run(TritonAttention(pool, invariant=True), params)
                assert torch.equal(got, together[begin + at : begin + end]), (row, at, size)


#: positions of padding behind the chunks
SPARE = 70


def captured(setup: Setup, decodes: int, chunks: int, pages: int) -> Any:
    """The step as a captured one has it: padded to so many rows of each kind, with page tables of ``pages``,
    the positions that are left in a last row without a context, and no lengths on the host."""
    batch, task = setup.batch(), setup.task
    live = setup.num_decodes
    more, behind = decodes - live, chunks - (len(task.q_lens) - live)
    device = task.q.device

    def table(rows: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(len(rows), pages, dtype=torch.int64, device=device)
        wide[:, : rows.shape[1]] = rows[:, :pages]
        return wide

    zeros = torch.zeros(more, dtype=torch.int64, device=device)
    rows = table(batch.block_table)
    cu_q = batch.cu_q[live:] + more
    batch.slot_mapping = torch.cat(
        (batch.slot_mapping[:live], zeros, batch.slot_mapping[live:], zeros.new_zeros(SPARE))
    )
    batch.cu_q = torch.cat((torch.arange(decodes, device=device), cu_q, cu_q[-1:].expand(behind)))
    batch.cu_q[-1] += SPARE
    batch.kv_len = torch.cat((batch.kv_len[:live], zeros, batch.kv_len[live:], zeros.new_zeros(behind)))
    batch.block_table = torch.cat(
        (rows[:live], rows.new_zeros(more, pages), rows[live:], rows.new_zeros(behind, pages))
    )
    batch.num_decodes, batch.kv_lens, batch.q_lens = decodes, [], []
    return batch


@nightly(INTERPRETER)
@pytest.mark.parametrize(
    ("float8", "invariant", "dtype", "options"),
    points(
        [(True, False, torch.bfloat16, {})],
        [
            (True, True, torch.bfloat16, {}),
            (True, False, torch.float16, {"soft_cap": 5.0}),
            (True, False, torch.float32, {"window": 30}),
            (False, False, torch.bfloat16, {}),
            (False, True, torch.float32, {"window": 30}),
        ],
        INTERPRETER,
    ),
)
def test_a_captured_step_computes_what_the_plain_one_does(
    device: str,
    float8: bool,
    invariant: bool,
    dtype: torch.dtype,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Padding in front of the chunks and behind, and keys divided among programs by what contexts may become,
    unless that would change bits."""
    from aioinfer.model.attention import triton_attention

    rows = [(1, 77), (1, 2), (1, 64), (5, 5), (9, 130)]
    task = Problem.make(
        rows, heads=2, kv_heads=2, head_dim=16, page_size=64, dtype=dtype, device=device,
        window=options.get("window"),
    )  # fmt: skip
    pool = float8_pool(task, layers=2) if float8 else None
    setup = Setup(task, 3)
    pool, divided = pool or setup.pool(), []
    paged_prefill = triton_attention.paged_prefill

    def seen(*args: Any, splits: int, **named: Any) -> torch.Tensor:
        divided.append(splits)
        return paged_prefill(*args, splits=splits, **named)

    monkeypatch.setattr(triton_attention, "paged_prefill", seen)
    attention = triton_attention.TritonAttention(pool, invariant=invariant)

    def padded(values: torch.Tensor) -> torch.Tensor:
        spare = values.new_full((2 + SPARE, *values.shape[1:]), 2.0)
        return torch.cat((values[:3], spare[:2], values[3:], spare[2:]))

    qkv = torch.cat([padded(each) for each in (task.q, setup.k, setup.v)], dim=1)
    batch = captured(setup, decodes=5, chunks=4, pages=8)
    got = attention.fused(1, qkv, None, None, batch, AttentionParams(0.2, **options))
    bound, expected = TOLERANCE[dtype], task.expected(0.2, **options)
    live = torch.cat((got[:3], got[5:-SPARE])).double().cpu()
    torch.testing.assert_close(live, expected, rtol=bound, atol=bound)
    assert not got[3:5].any(), "padding"
    assert not got[-SPARE:].any(), "padding"
    assert divided == ([1] if invariant else [2, 1 if "window" in options else 2])


@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float16], INTERPRETER))
def test_keys_of_8_bits_may_be_shared(device: str, dtype: torch.dtype) -> None:
    """By a layer with queries alone, as in Gemma 3n and 4: it writes nothing."""
    from aioinfer.model.attention.triton_attention import TritonAttention

    task = Problem.make(
        [(1, 40), (6, 9)], heads=4, kv_heads=2, head_dim=16, page_size=16, dtype=dtype, device=device
    )
    pool, setup = float8_pool(task, layers=2), Setup(task, 1)
    kept = [each.clone() for each in (pool.keys[1].view(torch.uint8), pool.key_scales[1])]
    params = AttentionParams(0.2, shared=True)
    got = TritonAttention(pool).fused(1, task.q, None, None, setup.batch(), params)
    assert_close(got, task.expected(0.2), dtype)
    assert torch.equal(pool.keys[1].view(torch.uint8), kept[0])
    assert torch.equal(pool.key_scales[1], kept[1])
