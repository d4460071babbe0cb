"""The Triton attention behind the interface: against the SDPA kernels, in the engine, and who is chosen."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.llm import LLM
from aioinfer.model import triton_support
from aioinfer.model.attention.base import Attention, AttentionParams
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.backend import Backend
from aioinfer.model.heads import HeadNorm
from aioinfer.model.kernels import choose_attention, make_attention, make_operations
from aioinfer.model.operations.torch_operations import TorchOperations
from aioinfer.params import SamplingParams
from tests.model.checkpoints import greedy
from tests.model.kernels import TOLERANCE, Problem, Setup, kernels_or_skip
from tests.model.test_oracle import prompts
from tests.tiers import INTERPRETER, SLOW_MODEL, grid, nightly


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


@nightly(SLOW_MODEL)
@pytest.mark.parametrize(
    "family",
    ["qwen3", "mistral-window", "gemma2", "gemma3", "olmo3", "glm4", "smollm3", "gpt-oss", "gemma4-shared"],
)
def test_greedy_ids_equal_transformers(
    checkpoint: Callable[[str], tuple[Path, Any]], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole engine on interpreted kernels; compiled ones have tests/model/test_cuda.py."""
    kernels_or_skip("cpu")
    from aioinfer.model.attention import triton_attention
    from aioinfer.model.operations.triton_operations import TritonOperations

    calls = set()

    def watch(owner: Any, name: str) -> None:
        plain = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **named: (calls.add(name), plain(*args, **named))[1])

    names = {
        "rotate_and_store": triton_attention,
        "gate_mul": TritonOperations,
        "add_norm": TritonOperations,
    }
    for name, owner in names.items():
        watch(owner, name)
    path, oracle = checkpoint(family)
    config = EngineConfig(
        model=str(path), dtype="float32", page_size=8, num_pages=64, chunk_size=16, threads=1,
        device="cpu", attention_backend="triton",
    )  # fmt: skip
    batch = prompts(2, 4)
    with LLM(config) as llm:
        results = llm.generate(batch, SamplingParams(temperature=0, max_tokens=6))
    # gpt-oss has gates in experts only.
    assert calls == set(names) - ({"gate_mul"} if family == "gpt-oss" else set())
    assert [result.token_ids for result in results] == [greedy(oracle, prompt, 6) for prompt in batch]


def test_a_cpu_has_torchs_own_kernels_for_the_asking() -> None:
    cpu = torch.device("cpu")
    backend = choose_attention(cpu, {64}, torch.float32, "sdpa")
    assert backend == Backend("sdpa", "asked for")
    attention = make_attention(
        backend, [KVShape(1, 16)], num_pages=1, page_size=8, dtype=torch.float32, device=cpu
    )
    assert isinstance(attention, SDPAAttention)
    assert isinstance(make_operations(backend), TorchOperations)


def test_cuda_has_triton_unless_something_is_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, bf16 = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    pytest.importorskip("triton", reason="triton is not installed")

    monkeypatch.setattr(triton_support, "interpreted", lambda: False)
    monkeypatch.setattr(triton_support, "build_unsupported", lambda: None)
    assert choose_attention(cuda, {128}, bf16) == Backend("triton", "the device is CUDA")
    assert choose_attention(cuda, {128}, bf16, "sdpa").name == "sdpa"
    assert choose_attention(cuda, {257}, bf16) == Backend("sdpa", "heads of size 257 are larger than 256")
    assert choose_attention(cuda, {64}, torch.float64) == Backend("sdpa", "there are no kernels for float64")
    with pytest.raises(
        ConfigError, match=r"^attention_backend: triton was asked for, and TRITON_INTERPRET is not set"
    ):
        choose_attention(torch.device("cpu"), {64}, bf16, "triton")
    monkeypatch.setattr(triton_support, "build_unsupported", lambda: "there is no C compiler")
    assert choose_attention(cuda, {64}, bf16) == Backend("sdpa", "there is no C compiler")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert choose_attention(cuda, {64}, bf16) == Backend(
        "sdpa", "the device is older than compute capability 8.0"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton_support, "interpreted", lambda: True)
    assert choose_attention(cuda, {64}, bf16) == Backend("sdpa", "TRITON_INTERPRET is set")


def test_without_triton_everything_runs_on_torchs_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_support.importlib.util, "find_spec", lambda _: None)
    chosen = choose_attention(torch.device("cuda"), {64}, torch.float16)
    assert chosen == Backend("sdpa", "triton is not installed")
    with pytest.raises(ConfigError, match="not installed"):
        choose_attention(torch.device("cuda"), {64}, torch.float16, "triton")
