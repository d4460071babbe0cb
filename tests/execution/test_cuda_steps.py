"""Steps on CUDA: graphs, streams and memory. Needs a GPU."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.params import SamplingParams
from tests.execution.waits import WATCHING, waits
from tests.model.checkpoints import greedy
from tests.model.test_oracle import prompts

pytestmark = pytest.mark.gpu
TOKENS = 24


def config(path: Path, **changes: Any) -> EngineConfig:
    settings = {"dtype": "float32", "device": "cuda", "num_pages": 128, "page_size": 16}
    settings |= {"prefill_graph_tokens": 64, **changes}
    return EngineConfig(model=str(path), max_running_requests=12, **settings)


class WatchedDevice(TorchDevice):
    """Raises wherever the launch thread would wait for the device, once ``watching``."""

    def __init__(self, settings: EngineConfig) -> None:
        super().__init__(settings)
        self.watching = False
        self.launched = 0

    def launch(self, prepared: Any) -> Any:
        self.launched += 1
        # The first steps of each shape compile kernels, which may wait.
        with waits(allowed=not self.watching):
            return super().launch(prepared)


@pytest.mark.parametrize("family", ["llama-gqa-tied", "mistral-window", "qwen2", "qwen3"])
@pytest.mark.parametrize("window", [0, 1, 2])
async def test_replays_give_the_ids_of_transformers(
    checkpoint: Callable[[str], tuple[Path, Any]], family: str, window: int
) -> None:
    """From replays of decodes and mixed steps, some of which are padded, and from plain ones; prompts arrive
    all at once, and beside decodes."""
    path, oracle = checkpoint(family)
    batch = [*prompts(13, 5), *(list(range(at, at + length)) for at, length in enumerate((3, 40, 1, 90, 17)))]
    wanted = [SamplingParams(temperature=0, max_tokens=TOKENS + at, ignore_eos=True) for at in range(10)]
    ids = [greedy(oracle, prompt, TOKENS + at) for at, prompt in enumerate(batch)]
    for rows, tokens in ((0, 0), (4, 16), (256, 2048)):
        graphs = {"decode_graph_rows": rows, "prefill_graph_tokens": tokens}
        async with Engine(config(path, overlap_steps=window, chunk_size=33, **graphs)) as engine:
            streams = []
            for at, request in enumerate(zip(batch, wanted, strict=True)):
                streams.append(engine.generate(*request))
                if at > 5:
                    async for _ in streams[-1]:
                        break
            found = [(await stream).token_ids for stream in streams]
        assert found == ids, rows


@pytest.mark.parametrize("sampling", ["triton", "torch"])
async def test_logits_processors_change_their_own_rows(
    checkpoint: Callable[[str], tuple[Path, Any]], sampling: str
) -> None:
    """Rows are copied to the host and back, beside others that a graph samples."""
    path, oracle = checkpoint("qwen3")

    def nothing(ids: Any, logits: Any) -> None:
        assert logits.shape == (oracle.config.vocab_size,)

    async def ban(ids: Any, logits: Any) -> None:
        logits[: len(logits) // 2] = float("-inf")

    batch = prompts(13, 4)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    kinds = [params, *(params.changed(logits_processors=(each,)) for each in (nothing, ban)), params]
    async with Engine(config(path, sampling_backend=sampling, decode_graph_rows=8)) as engine:
        results = await asyncio.gather(*map(engine.generate, batch, kinds))
    for at in (0, 1, 3):
        assert results[at].token_ids == greedy(oracle, batch[at], TOKENS)
    assert min(results[2].token_ids) >= oracle.config.vocab_size // 2


@pytest.mark.parametrize("sampling", ["triton", "torch"])
async def test_sampled_rows_do_not_depend_on_graphs(
    checkpoint: Callable[[str], tuple[Path, Any]], sampling: str
) -> None:
    path, _ = checkpoint("qwen3")
    kinds: list[dict[str, Any]] = [
        {"top_k": 20, "top_p": 0.9},
        {"temperature": 2.0, "min_p": 0.01},
        {},
        {"logprobs": 2},
        {"frequency_penalty": 1.0},
        {"logit_bias": {5: 3.0}},
    ]
    for some in (kinds[:3], kinds):
        seen = []
        for rows in (0, 256):
            async with Engine(config(path, decode_graph_rows=rows, sampling_backend=sampling)) as engine:
                results = await asyncio.gather(
                    *[
                        engine.generate(prompt, SamplingParams(seed=at, max_tokens=TOKENS, **kind))
                        for at, (prompt, kind) in enumerate(zip(prompts(4, len(some)), some, strict=True))
                    ]
                )
            seen.append([result.token_ids for result in results])
        assert seen[0] == seen[1]


@WATCHING
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.9, "top_k": 40}])
async def test_launching_never_waits_for_the_device(
    checkpoint: Callable[[str], tuple[Path, Any]], params: dict[str, Any]
) -> None:
    path, _ = checkpoint("qwen3")
    settings = config(path)
    device = WatchedDevice(settings)
    async with Engine(settings, launcher=lambda _: ThreadLauncher(device)) as engine:
        for device.watching in (False, True):
            wanted = SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=1, **params)
            results = await asyncio.gather(*[engine.generate(prompt, wanted) for prompt in prompts(2, 5)])
            assert [len(result.token_ids) for result in results] == [TOKENS] * 5
    assert device.launched >= 2 * TOKENS


async def test_the_callers_current_device_is_the_engines_and_stays_his(
    checkpoint: Callable[[str], tuple[Path, Any]],
) -> None:
    """Of several GPUs the last one, by its number and as the current one; inline on the caller's thread."""
    path, _ = checkpoint("qwen3")
    last = torch.cuda.device_count() - 1
    for name, current in ((f"cuda:{last}", 0), ("cuda", last)):
        for mode in ("thread", "inline"):
            with torch.cuda.device(current):
                async with Engine(config(path, device=name, launch_mode=mode)) as engine:
                    await engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
                    assert engine.info.device == f"cuda:{last}"
                assert torch.cuda.current_device() == current


async def test_the_pool_leaves_alone_what_it_may_not_use(
    checkpoint: Callable[[str], tuple[Path, Any]],
) -> None:
    path, _ = checkpoint("qwen3")
    free, total = torch.cuda.mem_get_info()
    share = (total - free) / total + 0.05
    # Few positions: without a limit of its own, so small a model takes what all requests could use at most.
    async with Engine(config(path, num_pages=None, gpu_memory_utilization=share)) as engine:
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=4))
        after, _ = torch.cuda.mem_get_info()
        assert total - after <= share * total


async def test_the_timeline_has_the_devices_own_times(
    checkpoint: Callable[[str], tuple[Path, Any]],
) -> None:
    path, _ = checkpoint("qwen3")
    settings = config(path)
    device = TorchDevice(settings)
    async with Engine(settings, launcher=lambda _: ThreadLauncher(device)) as engine:
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
        forwards = [event for event in device.lane.events if event[0] == "forward" and event[1] > 1]
        stats = engine.stats()
    assert len(forwards) >= TOKENS - 2
    for (_, _, start, end), (_, _, after, _) in pairwise(forwards):
        assert start < end <= after + 1e-4
    assert 0 < stats.overlap_ratio <= 1


async def test_closed_engines_give_their_memory_back(checkpoint: Callable[[str], tuple[Path, Any]]) -> None:
    """But for the workspace that cuBLAS keeps for each stream."""
    path, _ = checkpoint("qwen3")
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            async with Engine(config(path, num_pages=1 << 16)) as engine:
                await engine.generate([1, 2, 3], SamplingParams(max_tokens=TOKENS, logprobs=1))
                assert torch.cuda.memory_allocated() - before[0] > 256 << 20, "there is little to give back"
            after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
            assert max(late - early for late, early in zip(after, before, strict=True)) < 128 << 20
    finally:
        gc.enable()
