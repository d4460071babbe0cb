"""How many KV pages there are, and the warm-up that finds out what else needs memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError, OutOfMemory
from aioinfer.execution.backends import Backend
from aioinfer.execution.build import Parts, build, paged
from aioinfer.execution.decoding import kind
from aioinfer.execution.device import DeviceInfo
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.execution.sizing import PoolSize, by_memory, cuda_budget, size_pool
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.inspection import LoadOptions
from aioinfer.model.kernels import choose_attention
from aioinfer.model.loader import load_model
from aioinfer.model.spec import ModelSpec
from aioinfer.observe.timeline import DeviceLane
from tests.tiers import SECONDS, rest

GIB = 1 << 30
SPEC = ModelSpec(
    architecture="Any",
    num_layers=2,
    kv_layers=(KVShape(1, 8),) * 2,
    hidden_size=16,
    vocab_size=10,
    max_model_len=1000,
    dtype=torch.float32,
    eos_token_ids=frozenset(),
    num_parameters=0,
)


@pytest.mark.parametrize(
    ("gib", "given", "found"),
    [
        (24, {}, (64, 2048, 512)),
        (39.5, {}, (128, 4096, 1024)),
        (79, {}, (256, 8192, 2048)),
        (140, {"chunk_size": 100}, (256, 8192, 100)),
        (140, {"max_running_requests": 900}, (900, 8192, 2048)),
        (140, {"max_step_tokens": 100}, (100, 100, 2048)),
        (140, {"max_running_requests": 3, "max_step_tokens": 5, "chunk_size": 7}, (3, 5, 7)),
    ],
)
def test_what_is_left_open_follows_from_the_memory_of_the_device(
    gib: float, given: dict[str, int], found: tuple[int, int, int]
) -> None:
    config = by_memory(EngineConfig(**given), int(gib * GIB))
    assert (config.running_requests, config.step_tokens, config.chunk_tokens) == found


def test_an_engine_settles_for_what_its_device_says_where_the_config_says_nothing() -> None:
    info = DeviceInfo(10, 20, 30, frozenset(), "a device", settled={"max_step_tokens": 99, "chunk_size": 98})
    left_open = info.settle(EngineConfig(chunk_size=5))
    assert (left_open.running_requests, left_open.step_tokens, left_open.chunk_tokens) == (64, 99, 5)
    far = DeviceInfo(10, 20, 30, frozenset(), "of another config", settled={"max_running_requests": 256})
    assert far.settle(EngineConfig(max_step_tokens=99)).running_requests == 99
    short = DeviceInfo(10, 20, 30, frozenset(), "a device", max_running_requests=3)
    assert short.settle(EngineConfig()).running_requests == 3
    assert short.settle(EngineConfig(max_running_requests=2)).running_requests == 2


def sized(budget: int, **settings: Any) -> PoolSize:
    config = EngineConfig(**{"page_size": 10, "max_running_requests": 4, **settings})
    return size_pool(config, SPEC, 1000, budget)


def test_pages_fill_the_budget_but_never_more_than_all_requests_could_use() -> None:
    assert sized(150_999) == PoolSize(150, 1000)
    assert sized(10**9) == PoolSize(400, 1000)
    assert sized(10**9, max_model_len=95) == PoolSize(40, 95)
    assert sized(0, num_pages=7) == PoolSize(7, 70)


@pytest.mark.parametrize("budget", [999, 0, -5 * GIB])
def test_a_budget_below_one_page_is_out_of_memory_and_says_what_helps(budget: int) -> None:
    with pytest.raises(OutOfMemory, match="gpu_memory_utilization"):
        sized(budget)


def test_pages_are_larger_on_cuda_unless_the_config_says() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert paged(EngineConfig(), cuda).page_size == 64
    assert paged(EngineConfig(), cpu).page_size == EngineConfig().positions_per_page == 16
    for device in (cpu, cuda):
        assert paged(EngineConfig(page_size=24), device).page_size == 24


def test_a_tile_of_keys_lies_within_a_page_of_cuda() -> None:
    """On every GPU and for every head: then kernels look a page up once per tile."""
    pytest.importorskip("triton", reason="triton is not installed")
    from aioinfer.execution.build import CUDA_PAGE_SIZE
    from aioinfer.model.attention.triton_decode import DecodeTuning
    from aioinfer.model.attention.triton_prefill import PrefillTuning

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for head_dim in (16, 64, 80, 128, 256):
            assert CUDA_PAGE_SIZE % DecodeTuning.of(head_dim, dtype).block_n == 0
            for capability in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0)):
                assert CUDA_PAGE_SIZE % PrefillTuning.of(head_dim, dtype, capability).block_n == 0


def test_lengths_that_cannot_be_served_are_refused() -> None:
    with pytest.raises(ConfigError, match="1000 positions"):
        sized(10**9, max_model_len=1001)
    with pytest.raises(ConfigError, match="70 positions"):
        sized(0, num_pages=7, max_model_len=71)
    with pytest.raises(ConfigError, match="no room"):
        sized(0, num_pages=1, page_size=1)


def test_a_cuda_budget_leaves_alone_what_it_may_not_use() -> None:
    total, free = 100 * GIB, 60 * GIB
    assert cuda_budget(total=total, free=free, wanted=0, utilization=1.0) == free
    assert cuda_budget(total=total, free=free, wanted=5 * GIB, utilization=0.75) == 30 * GIB
    assert cuda_budget(total=total, free=20 * GIB, wanted=0, utilization=0.5) < 0


def built(config: EngineConfig) -> tuple[Parts, Backend, PoolSize]:
    """The bundled model on a CPU, ready for steps."""
    cpu = torch.device("cpu")
    model = load_model(config.model_path, LoadOptions(dtype="float32", device=cpu))
    choice = choose_attention(cpu, model.spec.head_dims, torch.float32)
    parts = Parts(config, kind(model.spec), model, choice, cpu, GrammarWorker(), DeviceLane())
    return parts, *build(parts)


@rest(SECONDS)
def test_a_token_that_does_not_exist_fails_its_step_alone() -> None:
    """Before the device sees it: a CUDA device would be lost."""
    parts, backend, size = built(EngineConfig(dtype="float32", num_pages=8))
    vocab_size = parts.model.spec.vocab_size
    _, prefill, _ = parts.largest_steps(size.max_model_len)
    for token in (-1, -(2**63), vocab_size, 10**9, 2**63 - 1):
        prefill.sections["input_ids"][3] = token
        with pytest.raises(ValueError, match=f"there is no token {token}, "):
            backend.launch(prefill)
    prefill.sections["input_ids"][3] = vocab_size - 1
    backend.launch(prefill).wait()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_step_tokens": 64, "max_running_requests": 7},
        {"max_running_requests": 1, "max_model_len": 2, "page_size": 1},
        {"max_running_requests": 3, "max_step_tokens": 3},
        {"max_running_requests": 1, "max_model_len": 30, "page_size": 16},
    ],
)
def test_the_largest_steps_run_and_touch_the_junk_page_alone(settings: dict[str, Any]) -> None:
    config = EngineConfig(**{"dtype": "float32", "num_pages": 8, **settings})
    parts, backend, size = built(config)
    scored, prefill, decode = parts.largest_steps(size.max_model_len)
    assert len(scored.sections["score_ids"]) == len(scored.sections["input_ids"]), "every position is scored"
    assert len(scored.sections["input_ids"]) == len(prefill.sections["input_ids"])
    assert set(prefill.sections["slot_mapping"] // config.positions_per_page) == {0}
    assert set(decode.sections["slot_mapping"] // config.positions_per_page) == {0}
    assert max(decode.kv_lens) <= size.max_model_len, "beyond that there may be no position"
    assert len(decode.q_lens) == config.running_requests
    longest = config.running_requests * (size.max_model_len - 1)
    least = min(config.step_tokens - config.running_requests + 1, longest)
    assert least <= len(prefill.sections["input_ids"]) <= config.step_tokens
    for step in (scored, prefill, decode):
        tokens = backend.launch(step).wait().tokens
        assert all(0 <= token < parts.model.spec.vocab_size for token in tokens)
