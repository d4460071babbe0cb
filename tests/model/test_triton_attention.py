"""The Triton attention behind the interface: against the SDPA kernels, in the engine, and who is chosen."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch

from aioinfer.model.attention.base import Attention, AttentionParams
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.heads import HeadNorm
from tests.model.kernels import TOLERANCE, Problem, Setup
from tests.tiers import INTERPRETER, grid, nightly, points


def random_setup(seed: int, device: str, dtype: torch.dtype) -> tuple[Setup, AttentionParams]:
    rng = random.Random(seed)
    kv_heads = rng.choice([1, 2, 3])
    decodes = [(1, rng.randint(2, 90)) for _ in range(rng.choice([0, 1, 4]))]
    chunks = []
    for _ in range(rng.choice([1, 2, 4]) if decodes else rng.choice([2, 3])):
        q_len = rng.choice([1, 2, 9, 31])
        chunks.append((q_len, q_len + rng.choice([0, 0, 7, 40])))
    task = Problem.make(
        decodes + chunks if seed % 4 else decodes or [(1, 5), (1, 64)],
        heads=kv_heads * rng.choice([1, 2, 3, 7]),
        kv_heads=kv_heads,
        head_dim=rng.choice([16, 24, 64, 80]),
        page_size=rng.choice([8, 16, 32]),
        dtype=dtype,
        device=device,
        seed=seed,
    )
    num_decodes = len(decodes) if seed % 4 else len(task.q_lens)
    window, soft_cap, block = rng.choice([None, None, 5, 40]), rng.choice([None, 1.5]), rng.choice([1, 8])
    return Setup(task, num_decodes), AttentionParams(0.2, window, soft_cap, block)


def triton_attention(pool: KVPool) -> Attention:
    """With splits so short that contexts of tests have several."""
    from aioinfer.model.attention.triton_attention import TritonAttention
    from aioinfer.model.attention.triton_decode import DecodeTuning

    return TritonAttention(pool, decode=DecodeTuning(split_size=32, block_n=32, num_stages=2))


@nightly(INTERPRETER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", grid(range(2), range(2, 12), INTERPRETER))
def test_a_step_is_what_the_sdpa_kernels_make_of_it(device: str, seed: int, dtype: torch.dtype) -> None:
    """Decodes only, chunks only, and both; all kinds of groups, windows, blocks, page and head sizes; heads
    that were prepared and, every other time, a projection, whose keys may be normed."""
    setup, params = random_setup(seed, device, dtype)
    reference, pool = setup.pool(), setup.pool()
    run = setup.run
    if seed % 2:
        heads = setup.task.q.shape[1] + setup.k.shape[1]
        weight = torch.linspace(-1.5, 1.5, heads * setup.k.shape[2], device=device).to(dtype)
        norm = HeadNorm(weight.view(heads, -1), 1e-6) if seed % 3 else None

        def run(attention: Attention, params: AttentionParams) -> torch.Tensor:
            return setup.run_fused(attention, norm, params)

    expected = run(SDPAAttention(reference), params)
    got = run(triton_attention(pool), params)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)
    # Of a norm the last bit may differ.
    bound = torch.finfo(dtype).eps * 2 if seed % 2 and seed % 3 else 0
    for ours, theirs in ((pool.keys, reference.keys), (pool.values, reference.values)):
        for layer in (0, 1):
            torch.testing.assert_close(ours[layer], theirs[layer], rtol=bound, atol=bound, equal_nan=True)


def test_soft_caps_and_diffusion_blocks_reach_both_kernels(device: str) -> None:
    task = Problem.make(
        [(1, 24), (16, 32), (8, 24)], heads=4, kv_heads=2, head_dim=32, page_size=16, device=device
    )
    from aioinfer.model.attention.triton_attention import TritonAttention

    setup = Setup(task, 1)
    got = TritonAttention(setup.pool())(
        1, task.q, setup.k, setup.v, setup.batch(), AttentionParams(0.2, soft_cap=1.5, block=8)
    )
    expected = task.expected(0.2, soft_cap=1.5, block=8)
    torch.testing.assert_close(got.double().cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", grid([torch.bfloat16], [torch.float32, torch.float16], INTERPRETER))
@pytest.mark.parametrize(
    ("part", "float8"),
    points(
        [pytest.param("v", False, id="")],
        [pytest.param("v", True, id="float8"), pytest.param("k", True, id="float8-key")],
        INTERPRETER,
    ),
)
@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_what_is_not_finite_reaches_those_alone_who_see_its_position(
    device: str, fused: bool, part: str, float8: bool, dtype: torch.dtype
) -> None:
    """One value of a chunk; or, where that would round the others to 0, a key."""
    shape: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 24, "page_size": 8}
    params, found = AttentionParams(0.2, window=7), []
    for value in (1.0, math.inf, math.nan):
        setup = Setup(Problem.make([(1, 9), (20, 24)], dtype=dtype, device=device, **shape), 1)
        getattr(setup, part)[10, 1, 15] = value
        pool = KVPool(
            [KVShape(2, 24)] * 2,
            num_pages=7,
            page_size=8,
            dtype=dtype,
            device=torch.device(device),
            float8=float8,
        )
        attention = triton_attention(pool)
        if fused:
            weight = torch.ones(8, 24, dtype=dtype, device=device)
            found.append(setup.run_fused(attention, HeadNorm(weight, 1e-6), params))
        else:
            found.append(setup.run(attention, params))
    seeing = torch.zeros(21, dtype=torch.bool, device=device)
    seeing[10:17] = True
    for got in found[1:]:
        assert torch.equal(got[~seeing], found[0][~seeing])
        assert not got[seeing].flatten(1).isfinite().all(1).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_storing_from_slices_of_a_projection(device: str, dtype: torch.dtype) -> None:
    from aioinfer.model.attention.triton_attention import store_kv

    generator = torch.Generator().manual_seed(0)
    qkv = torch.randn(5, 9, 24, generator=generator).to(dtype).to(device)
    k, v = qkv[:, 3:6], qkv[:, 6:]
    keys, values = (torch.zeros(4, 8, 3, 24, dtype=dtype, device=device) for _ in range(2))
    slots = torch.tensor([31, 0, 8, 9, 17], device=device)
    store_kv(k, v, keys, values, slots)
    for store, rows in ((keys, k), (values, v)):
        expected = torch.zeros_like(store)
        expected.flatten(0, 1)[slots] = rows
        assert torch.equal(store, expected)
    # Heads that are not contiguous are copied first.
    store_kv(k.mT.contiguous().mT, v, keys, values, slots)
    assert torch.equal(keys.flatten(0, 1)[slots], k)
    with pytest.raises(ValueError, match="contiguous"):
        store_kv(k, v, keys.transpose(0, 1), values, slots)


@nightly(INTERPRETER)
def test_a_captured_decode_follows_lengths_and_pages_on_the_device(device: str) -> None:
    """Between capture and replay everything but shapes and addresses changes. Interpreted: the same calls."""
    from aioinfer.model.attention.triton_attention import TritonAttention

    shape: dict[str, Any] = {"heads": 8, "kv_heads": 2, "head_dim": 64, "page_size": 16, "device": device}
    first = Setup(Problem.make([(1, 700), (1, 3), (1, 420), (1, 1)], seed=1, **shape), 4)
    second = Setup(Problem.make([(1, 20), (1, 513), (1, 300), (1, 0)], seed=2, **shape), 4)
    static, task = first.task, second.task
    table = torch.zeros(4, 64, dtype=torch.int64, device=device)
    table[:, : static.block_table.shape[1]] = static.block_table
    static.block_table = table
    pool = first.pool()
    attention, batch = TritonAttention(pool), first.batch()

    def call() -> torch.Tensor:
        return attention(1, static.q, first.k, first.v, batch, AttentionParams(0.2))

    out, expected = call(), static.expected(0.2)
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-5, atol=1e-5)
    graph = None
    if device == "cuda":
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = call()
    table[:, : task.block_table.shape[1]] = task.block_table
    for stored, other in ((pool.keys[1], task.keys), (pool.values[1], task.values)):
        stored[: len(other)] = other
    for mine, other in (
        *((static.q, task.q), (first.k, second.k), (first.v, second.v)),
        *((first.slots, second.slots), (static.kv_len, task.kv_len)),
    ):
        mine.copy_(other)
    if graph is None:
        out = call()
    else:
        graph.replay()
    torch.testing.assert_close(out.double().cpu(), task.expected(0.2), rtol=1e-5, atol=1e-5)
