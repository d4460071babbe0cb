"""Keys and values of 8 bits: what is written, what attention makes of it, and engines that run so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.llm import LLM
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.backend import Backend
from aioinfer.model.heads import HeadNorm
from aioinfer.model.kernels import check_kv_dtype
from aioinfer.model.rope import Rotary
from aioinfer.params import SamplingParams
from tests.model.checkpoints import make_checkpoint
from tests.model.float8 import rounded_heads, widened
from tests.model.kernels import (
    TOLERANCE,
    Problem,
    Setup,
    assert_close,
    interpreted_on,
    interpreted_only,
    matmul_by_rows,
    normal,
)
from tests.tiers import INTERPRETER, grid, nightly, points

#: (q_len, kv_len): a decode, padding rows, a chunk, a whole prompt
ROWS = [(1, 37), (20, 145), (2, 0), (0, 0), (9, 9)]


def float8_pool(task: Problem, layers: int = 1) -> KVPool:
    """The problem's keys and values, which become those that the pool has."""
    pages, page_size, kv_heads, head_dim = task.keys.shape
    pool = KVPool(
        [KVShape(kv_heads, head_dim)] * layers,
        num_pages=pages - 1, page_size=page_size, dtype=task.q.dtype, device=task.q.device, float8=True,
    )  # fmt: skip
    for store, own, scales in (
        (task.keys, pool.keys, pool.key_scales), (task.values, pool.values, pool.value_scales),
    ):  # fmt: skip
        values, exponents = rounded_heads(store.cpu())
        own[-1].view(torch.uint8).copy_(values.view(torch.uint8))
        scales[-1].copy_(exponents)
        store.copy_(widened(values, exponents).to(store.dtype))
    return pool


def attend(pool: KVPool, setup: Setup, *, fused: bool = False, shared: bool = False) -> torch.Tensor:
    """A step of a layer that prepares heads itself, or hands over what was projected."""
    from aioinfer.model.attention.triton_attention import TritonAttention

    attention, task, params = TritonAttention(pool), setup.task, AttentionParams(0.2, shared=shared)
    if not (fused or shared):
        return attention(1, task.q, setup.k, setup.v, setup.batch(), params)
    qkv = task.q if shared else torch.cat((task.q, setup.k, setup.v), dim=1)
    return attention.fused(1, qkv, None, None, setup.batch(), params)


# -- writing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float32, torch.float16], INTERPRETER))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotated"),
    points([(4, 2, 64, 64)], [(3, 1, 80, 80), (14, 2, 32, 16), (5, 5, 24, 0)], INTERPRETER),
)
def test_what_is_written_is_what_the_plain_kernel_writes_rounded(
    device: str, heads: int, kv_heads: int, head_dim: int, rotated: int, dtype: torch.dtype
) -> None:
    from aioinfer.model.attention.triton_heads import rotate_and_store

    qkv = normal(5, heads + 2 * kv_heads, head_dim, seed=1)
    # Of many magnitudes, one a power of two, and one 0.
    qkv *= torch.exp2(normal(5, heads + 2 * kv_heads, 1, seed=2) * 3)
    qkv[1, -1], qkv[2, -1] = 0, 7.0
    qkv = qkv.to(device, dtype)
    angles = normal(5, 1, rotated, seed=3)
    rotary = Rotary(angles.cos().to(device, dtype), angles.sin().to(device, dtype)) if rotated else None
    norm = (
        HeadNorm(torch.ones(heads + kv_heads, head_dim, device=device, dtype=dtype), 1e-6)
        if rotated
        else None
    )
    slots = torch.tensor([9, 4, 15, 8, 0], device=device)
    shape = {"num_pages": 3, "page_size": 4, "dtype": dtype, "device": torch.device(device)}
    plain, own = (KVPool([KVShape(kv_heads, head_dim)], **shape, float8=float8) for float8 in (False, True))
    q = rotate_and_store(qkv, norm, rotary, plain.keys[0], plain.values[0], slots)
    again = rotate_and_store(qkv, norm, rotary, own.keys[0], own.values[0], slots, scales=own.scales(0))
    assert torch.equal(q, again)
    for store, values, exponents in (
        (plain.keys[0], own.keys[0], own.key_scales[0]),
        (plain.values[0], own.values[0], own.value_scales[0]),
    ):  # fmt: skip
        expected, powers = rounded_heads(store.cpu())
        assert torch.equal(exponents.cpu(), powers)
        assert torch.equal(values.cpu().view(torch.uint8), expected.view(torch.uint8))


# -- attention -----------------------------------------------------------------------------------------


@nightly(INTERPRETER)
@pytest.mark.parametrize(
    ("heads", "head_dim", "page_size", "options", "dtype"),
    points(
        [(4, 64, 16, {}, torch.bfloat16)],
        [
            (6, 80, 4, {"window": 20, "soft_cap": 20.0}, torch.float32),
            (14, 16, 16, {"window": 7}, torch.bfloat16),
            (6, 32, 64, {"window": 40, "soft_cap": 20.0}, torch.bfloat16),
            (6, 80, 64, {"window": 40, "soft_cap": 20.0}, torch.float16),
            (6, 64, 16, {"block": 8}, torch.float16),
            (6, 64, 24, {"window": 100}, torch.bfloat16),
            (6, 96, 16, {}, torch.bfloat16),
            (6, 128, 64, {"window": 1}, torch.float32),
            (16, 128, 64, {"block": 32, "window": 50}, torch.bfloat16),
            (6, 256, 64, {"soft_cap": 3.0}, torch.bfloat16),
            (6, 256, 16, {}, torch.float16),
        ],
        INTERPRETER,
    ),
)
def test_attention_is_that_over_the_numbers_that_are_stored(
    device: str, heads: int, head_dim: int, page_size: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Decodes over several splits; chunks whose tiles have masks and have none, with the tiles that a model
    gets, and with keys that are divided among more programs than there are tiles of them."""
    from aioinfer.model.attention.triton_decode import paged_decode
    from aioinfer.model.attention.triton_prefill import PrefillTuning, paged_prefill

    shape: dict[str, Any] = {
        "heads": heads, "kv_heads": 2, "head_dim": head_dim, "page_size": page_size, "dtype": dtype,
        "device": device, "window": options.get("window"),
    }  # fmt: skip
    scale, sinks = head_dim**-0.5, torch.linspace(-3, 3, heads, device=device)
    if "block" not in options:
        task = Problem.make([(1, 300), (1, 1), (1, 0), (1, 77)], **shape)
        pool = float8_pool(task)
        got = paged_decode(
            task.q, pool.keys[0], pool.values[0], task.block_table, task.kv_len, scale=scale,
            scales=pool.scales(0), **options,
        )  # fmt: skip
        assert_close(got, task.expected(scale, **options), dtype)
    task = Problem.make(ROWS, seed=1, **shape)
    pool, tuning = float8_pool(task), PrefillTuning.of_float8(head_dim, dtype)
    for splits, given in ((1, {}), (4, {"sinks": sinks})):
        got = paged_prefill(
            task.q, pool.keys[0], pool.values[0], task.block_table, task.cu_q, task.kv_len, scale=scale,
            num_tokens=len(task.q), scales=pool.scales(0), tuning=tuning, splits=splits, **options, **given,
        )  # fmt: skip
        assert_close(got, task.expected(scale, **options, **given), dtype)


def test_small_values_over_long_contexts_are_not_lost_in_float16(device: str) -> None:
    """Products of weights and factors would be below its smallest numbers."""
    from aioinfer.model.attention.triton_decode import paged_decode

    task = Problem.make(
        [(1, 600)], heads=2, kv_heads=1, head_dim=16, page_size=64, dtype=torch.float16, device=device
    )
    task.values.mul_(2.0**-10)
    pool = float8_pool(task)
    got = paged_decode(
        task.q, pool.keys[0], pool.values[0], task.block_table, task.kv_len, scale=0.01, scales=pool.scales(0)
    )
    expected = task.expected(0.01)
    assert float((got.double().cpu() - expected).norm() / expected.norm()) < 0.01


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_the_largest_numbers_of_float16_stay_finite(device: str, fused: bool) -> None:
    """The next number of 8 bits is 65,536, which float16 does not have."""
    task = Problem.make(
        [(1, 1), (1, 1)], heads=2, kv_heads=1, head_dim=16, page_size=8, dtype=torch.float16, device=device
    )
    pool, setup = float8_pool(task, layers=2), Setup(task, 2)
    setup.k.fill_(-65504)
    setup.v.fill_(65504)
    setup.v[1] = -63000
    got = attend(pool, setup, fused=fused)
    expected = torch.tensor([61440.0, -61440.0], device=device)[:, None, None].expand(got.shape)
    torch.testing.assert_close(got.float(), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_a_step_writes_and_reads_one_pool(device: str, fused: bool) -> None:
    """Both kinds of rows over what the step itself has written."""
    task = Problem.make(
        [(1, 40), (1, 5), (6, 9)], heads=4, kv_heads=2, head_dim=32, page_size=8, dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip
    pool, setup = float8_pool(task, layers=2), Setup(task, 2)
    for scales in (pool.key_scales[1], pool.value_scales[1]):
        scales.flatten(0, 1)[setup.slots] = 255
    got = attend(pool, setup, fused=fused)
    # What is stored of the step's own heads are numbers of 8 bits already: they are written without loss.
    assert_close(got, task.expected(0.2), torch.bfloat16)
    assert not pool.key_scales[0].any(), "another layer's"


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
def test_what_is_not_finite_stays_the_trouble_of_its_own_row(device: str) -> None:
    for bad in (math.nan, math.inf):
        shape: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 16, "page_size": 8}
        task = Problem.make([(3, 3), (2, 2)], **shape, dtype=torch.bfloat16, device=device)
        pool, setup = float8_pool(task, layers=2), Setup(task, 0)
        setup.v[1, 0, 5] = bad
        got = attend(pool, setup)
        # Of its own row also what stands before it, with a weight of 0, as without rounding.
        assert not got[1:3].isfinite().all(dim=-1).any()
        assert got[3:].isfinite().all()


@nightly(INTERPRETER)
@pytest.mark.parametrize("window", [None, 18])
@pytest.mark.parametrize(
    ("float8", "dtype"), [(False, torch.float32), (True, torch.bfloat16), (True, torch.float16)]
)
def test_a_deterministic_token_has_the_same_bits_as_decode_and_as_prefill(
    device: str, window: int | None, float8: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aioinfer.model.attention.triton_attention import TritonAttention

    if interpreted_on(device):
        monkeypatch.setattr(np, "matmul", matmul_by_rows)
    rows = [(1, 137), (3, 3), (9, 75)]
    task = Problem.make(
        rows, heads=4, kv_heads=2, head_dim=32, page_size=16, device=device, window=window, dtype=dtype
    )
    pool, params = float8_pool(task, layers=2) if float8 else None, AttentionParams(0.3, window)

    def run(setup: Setup) -> torch.Tensor:
        return setup.run(TritonAttention(pool or setup.pool(), invariant=True), params)

    together = run(Setup(task, 1))
    assert_close(together, task.expected(0.3, window=window), dtype)
    for row, (q_len, _) in enumerate(rows):
        begin = int(task.cu_q[row])
        for size in (1, 7):
            for at in range(0, q_len, size):
                end = min(at + size, q_len)
                alone = Setup(task.part(row, at, end), int(size == 1))
                assert torch.equal(run(alone), together[begin + at : begin + end]), (row, at, size)


#: positions of padding after the chunks
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
    """Padding before the chunks and after, and keys divided among programs by what contexts may become,
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
    task = Problem.make(
        [(1, 40), (6, 9)], heads=4, kv_heads=2, head_dim=16, page_size=16, dtype=dtype, device=device
    )
    pool, setup = float8_pool(task, layers=2), Setup(task, 1)
    kept = [each.clone() for each in (pool.keys[1].view(torch.uint8), pool.key_scales[1])]
    assert_close(attend(pool, setup, shared=True), task.expected(0.2), dtype)
    assert torch.equal(pool.keys[1].view(torch.uint8), kept[0])
    assert torch.equal(pool.key_scales[1], kept[1])


# -- engines -------------------------------------------------------------------------------------------


@nightly(INTERPRETER)
@interpreted_only
def test_an_engine_has_more_positions(device: str, tmp_path: Path) -> None:
    make_checkpoint("qwen3-blocks", tmp_path)
    options: dict[str, Any] = {
        "model": str(tmp_path), "dtype": "float32", "page_size": 8, "chunk_size": 16, "threads": 1,
        "device": "cpu", "attention_backend": "triton", "kv_memory_gib": 1e-4,
    }  # fmt: skip
    pages = []
    for kv_dtype in ("auto", "fp8"):
        config = EngineConfig(**options, kv_dtype=kv_dtype)
        with LLM(config) as llm:
            (result,) = llm.generate([[3, 1, 4, 1, 5]], SamplingParams(temperature=0, max_tokens=3))
        assert len(result.token_ids) == 3
        device = TorchDevice(config)
        info = device.open()
        device.close()
        pages.append(info.num_pages)
        assert info.description.endswith("in fp8") == (kv_dtype == "fp8")
    # A byte and a share of one, not four.
    assert pages[1] > 3.5 * pages[0]


def test_other_attention_refuses_it(tmp_path: Path) -> None:
    make_checkpoint("qwen3-blocks", tmp_path)
    options: dict[str, Any] = {"model": str(tmp_path), "num_pages": 64, "threads": 1, "device": "cpu"}
    with pytest.raises(ConfigError, match="kv_dtype: fp8 needs attention by Triton, this is sdpa: asked for"):
        LLM(EngineConfig(**options, attention_backend="sdpa", kv_dtype="fp8"))
    check_kv_dtype("auto", Backend("native", ""))
    check_kv_dtype("fp8", Backend("triton", ""))
