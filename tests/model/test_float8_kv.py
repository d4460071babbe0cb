"""Keys and values of 8 bits: what is written, what attention makes of it, and engines that run so."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.llm import LLM
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVPool, KVScales, KVShape
from aioinfer.model.backend import Backend
from aioinfer.model.heads import HeadNorm
from aioinfer.model.kernels import check_kv_dtype
from aioinfer.model.rope import Rotary
from aioinfer.params import SamplingParams
from tests.model.checkpoints import make_checkpoint
from tests.model.float8 import rounded_heads, widened
from tests.model.kernels import Problem, assert_close, interpreted_only, normal
from tests.model.test_triton_attention import Setup
from tests.tiers import INTERPRETER, grid, nightly, points

CPU = torch.device("cpu")


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
@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float32, torch.float16], INTERPRETER))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "window"),
    points(
        [(4, 2, 64, 16, None)],
        [(3, 1, 80, 4, 20), (8, 1, 128, 64, None), (14, 2, 16, 16, 7)],
        INTERPRETER,
    ),
)
def test_attention_is_that_over_the_numbers_that_are_stored(
    device: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """Decodes over several splits, and chunks whose tiles have masks and have none."""
    from aioinfer.model.attention.triton_decode import paged_decode
    from aioinfer.model.attention.triton_prefill import paged_prefill

    shape: dict[str, Any] = {
        "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "page_size": page_size,
        "dtype": dtype, "device": device, "window": window,
    }  # fmt: skip
    options: dict[str, Any] = {
        "scale": head_dim**-0.5,
        "window": window,
        "soft_cap": 20.0 if heads == 3 else None,
    }
    task = Problem.make([(1, 300), (1, 1), (1, 0), (1, 77)], **shape)
    pool = float8_pool(task)
    got = paged_decode(
        task.q, pool.keys[0], pool.values[0], task.block_table, task.kv_len, scales=pool.scales(0), **options
    )
    assert_close(got, task.expected(**options), dtype)
    task = Problem.make([(3, 200), (70, 140), (1, 1)], seed=1, **shape)
    pool = float8_pool(task)
    got = paged_prefill(
        task.q, pool.keys[0], pool.values[0], task.block_table, task.cu_q, task.kv_len,
        num_tokens=len(task.q), scales=pool.scales(0), **options,
    )  # fmt: skip
    assert_close(got, task.expected(**options), dtype)


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
    from aioinfer.model.attention.triton_attention import TritonAttention

    task = Problem.make(
        [(1, 1), (1, 1)], heads=2, kv_heads=1, head_dim=16, page_size=8, dtype=torch.float16, device=device
    )
    pool, setup = float8_pool(task, layers=2), Setup(task, 2)
    setup.k.fill_(-65504)
    setup.v.fill_(65504)
    setup.v[1] = -63000
    if fused:
        qkv = torch.cat((task.q, setup.k, setup.v), dim=1)
        got = TritonAttention(pool).fused(1, qkv, None, None, setup.batch(), AttentionParams(0.2))
    else:
        got = TritonAttention(pool)(1, task.q, setup.k, setup.v, setup.batch(), AttentionParams(0.2))
    expected = torch.tensor([61440.0, -61440.0], device=device)[:, None, None].expand(got.shape)
    torch.testing.assert_close(got.float(), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "apart"])
def test_a_step_writes_and_reads_one_pool(device: str, fused: bool) -> None:
    """Both kinds of rows over what the step itself has written."""
    from aioinfer.model.attention.triton_attention import TritonAttention

    task = Problem.make(
        [(1, 40), (1, 5), (6, 9)], heads=4, kv_heads=2, head_dim=32, page_size=8, dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip
    pool, setup = float8_pool(task, layers=2), Setup(task, 2)
    for scales in (pool.key_scales[1], pool.value_scales[1]):
        scales.flatten(0, 1)[setup.slots] = 255
    attention, params = TritonAttention(pool), AttentionParams(0.2)
    if fused:
        qkv = torch.cat((task.q, setup.k, setup.v), dim=1)
        got = attention.fused(1, qkv, None, None, setup.batch(), params)
    else:
        got = attention(1, task.q, setup.k, setup.v, setup.batch(), params)
    # What is stored of the step's own heads are numbers of 8 bits already: they are written without loss.
    assert_close(got, task.expected(0.2), torch.bfloat16)
    assert not pool.key_scales[0].any(), "another layer's"


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")  # of the interpreter
def test_what_is_not_finite_stays_the_trouble_of_its_own_row(device: str) -> None:
    from aioinfer.model.attention.triton_attention import TritonAttention

    for bad in (math.nan, math.inf):
        task = Problem.make(
            [(3, 3), (2, 2)],
            heads=2,
            kv_heads=1,
            head_dim=16,
            page_size=8,
            dtype=torch.bfloat16,
            device=device,
        )
        pool, setup = float8_pool(task, layers=2), Setup(task, 0)
        setup.v[1, 0, 5] = bad
        got = TritonAttention(pool)(1, task.q, setup.k, setup.v, setup.batch(), AttentionParams(0.2))
        # Of its own row also what stands before it, with a weight of 0, as without rounding.
        assert not got[1:3].isfinite().all(dim=-1).any()
        assert got[3:].isfinite().all()


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


def test_bytes_per_page_is_what_a_page_takes() -> None:
    layers, dtype = (KVShape(2, 8), KVShape(1, 24)), torch.bfloat16
    sizes = []
    for count in (5, 6):
        pool = KVPool(layers, num_pages=count, page_size=4, dtype=dtype, device=CPU, float8=True)
        sizes.append(
            sum(each.nbytes for each in pool.keys + pool.values + pool.key_scales + pool.value_scales)
        )
        assert isinstance(pool.scales(0), KVScales)
    assert sizes[1] - sizes[0] == KVPool.bytes_per_page(layers, 4, dtype, float8=True)
    assert KVPool(layers, num_pages=1, page_size=4, dtype=dtype, device=CPU).scales(0) is None
