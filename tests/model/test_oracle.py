"""Greedy ids equal transformers in float32, for every family, however the work is cut and mixed."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.llm import LLM
from aioinfer.params import SamplingParams
from tests.model.checkpoints import BY_TORCH, FURTHER_IN_ENGINES, IN_ENGINES, OWN, VOCAB, greedy, greedy_each
from tests.model.harness import fill, require
from tests.tiers import SECONDS, points, rest, thinned

Checkpoint = Callable[[str], tuple[Path, Any]]
TOKENS = 14
#: one of each kind of layers; the forwards of all families have tests of their own
KINDS = [(name, kernels) for name, kernels in IN_ENGINES if name in BY_TORCH]
KINDS = points(KINDS, FURTHER_IN_ENGINES)
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS)


def prompts(seed: int, count: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 5, 17, 40]))] for _ in range(count)]


def config(path: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(model=str(path), dtype="float32", num_pages=64, page_size=8, threads=1, **changes)


@rest(SECONDS)
@pytest.mark.parametrize(("family", "kernels"), KINDS)
async def test_mixed_with_staggered_arrivals(checkpoint: Checkpoint, family: str, kernels: str) -> None:
    """Requests arrive while others are in prefill and decode, in a pool too small for all of them. Nothing
    that others have left in it reaches them, not even a NaN."""
    require(kernels)
    path, oracle = checkpoint(family)
    batch = prompts(2, 7)
    changes: dict[str, Any] = {"chunk_size": 6, "max_running_requests": 4, "max_step_tokens": 16}
    changes |= {"attention_backend": kernels, "max_model_len": 64, "state_snapshot_tokens": 1}
    small = EngineConfig(model=str(path), dtype="float32", page_size=8, num_pages=12, threads=1, **changes)
    device = TorchDevice(small)
    async with Engine(small, launcher=lambda _: ThreadLauncher(device)) as engine:
        runner: Any = device._backend._runner  # type: ignore[union-attr]
        fill(runner.attention, math.nan)
        for states in [] if runner.states is None else runner.states.tensors:
            states.fill_(math.nan)
        streams = []
        for prompt in batch:
            streams.append(engine.generate(prompt, GREEDY))
            # Let the engine get a step or two ahead before the next one arrives.
            before = engine.stats().steps
            while engine.stats().steps == before and not streams[-1].done:
                await asyncio.sleep(0)
        results = await asyncio.gather(*streams)
        assert engine.stats().pages_private == 0
    found = [result.token_ids for result in results]
    assert found == greedy_each(oracle, batch, TOKENS, found)


@rest(SECONDS)
@pytest.mark.parametrize("kernels", ["sdpa", "native"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3.5-moe", "granite-hybrid", "falcon-h1"])
def test_a_cached_prefix_is_used_up_to_a_state_that_was_kept(
    checkpoint: Checkpoint, family: str, kernels: Any
) -> None:
    require(kernels)
    path, oracle = checkpoint(family)
    common = prompts(7, 1)[0][:1] + list(range(1, 22))
    batch = [[*common, *range(30 + 5 * at, 33 + 6 * at)] for at in range(4)]
    with LLM(config(path, attention_backend=kernels, state_snapshot_tokens=1)) as llm:
        results = [llm.generate([prompt], GREEDY)[0] for prompt in [*batch, batch[0]]]
        assert llm.stats().snapshot_hits == 3
    # The second one leaves a state where it parts from the first.
    assert [result.usage.cached_tokens for result in results] == [0, 0, 16, 16, 24]
    found = [result.token_ids for result in results]
    assert found == greedy_each(oracle, [*batch, batch[0]], TOKENS, found)


@pytest.mark.parametrize("family", thinned([name for name in OWN if name != "deepseek-v3"], 3))
def test_the_fallback_gives_the_same_as_our_own_code(checkpoint: Checkpoint, family: str) -> None:
    path, oracle = checkpoint(family)
    prompt = prompts(3, 1)[0]
    with LLM(config(path, transformers_fallback=True, chunk_size=4)) as llm:
        (result,) = llm.generate([prompt], GREEDY)
    assert result.token_ids == greedy(oracle, prompt, TOKENS, result.token_ids)


@pytest.mark.parametrize(
    "family",
    [
        "mistral-window",
        "gpt-oss",
        "gemma4-shared",
        "persimmon",
        "lfm2",
        "qwen3.5",
        "granite-hybrid",
        "cohere2",
    ],
)
def test_forced_retraction_changes_no_token(checkpoint: Checkpoint, family: str) -> None:
    """Two requests outgrow the pool together; one is retracted and computed again."""
    path, oracle = checkpoint(family)
    batch = [prompts(4, 1)[0][:1] + [7] * 15, [9] * 16]
    params = SamplingParams(temperature=0, max_tokens=40)
    settings: dict[str, Any] = {"page_size": 8, "num_pages": 8, "state_snapshot_tokens": 1}
    tight = EngineConfig(model=str(path), dtype="float32", threads=1, **settings)
    with LLM(tight) as llm:
        results = llm.generate(batch, params)
        assert llm._core.scheduler.queues.counters.retractions > 0
    found = [result.token_ids for result in results]
    assert found == greedy_each(oracle, batch, 40, found)
