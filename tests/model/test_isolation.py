"""What one request leaves behind in the pools of KV and states reaches no other, not even a NaN."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.execution.torch_device import TorchDevice
from tests.model.checkpoints import IN_ENGINES, RECURRENT, greedy_each
from tests.model.harness import fill, require
from tests.model.test_oracle import GREEDY, TOKENS, prompts
from tests.tiers import points

FAMILIES = ["qwen3", "qwen3-moe", "mistral-window", "gemma2", "olmo3", "gpt2-wide", "gpt-oss", "opt"]
FAMILIES += ["gemma4-shared", "gemma4-experts", *RECURRENT]
CHOSEN = [pair for pair in IN_ENGINES if pair[0] in FAMILIES]


@pytest.mark.parametrize(("family", "kernels"), points(CHOSEN[::2], CHOSEN[1::2]))
async def test_a_pool_full_of_nan_changes_no_token(
    checkpoint: Callable[[str], tuple[Path, Any]], family: str, kernels: Any
) -> None:
    require(kernels)
    path, oracle = checkpoint(family)
    config = EngineConfig(
        model=str(path), dtype="float32", page_size=8, num_pages=64, chunk_size=6, threads=1,
        attention_backend=kernels,
    )  # fmt: skip
    device = TorchDevice(config)
    batch = prompts(2, 7)
    async with Engine(config, launcher=lambda _: ThreadLauncher(device)) as engine:
        runner = device._backend._runner  # type: ignore[union-attr]
        fill(runner.attention, math.nan)
        for states in [] if runner.states is None else runner.states.tensors:
            states.fill_(math.nan)
        results = await asyncio.gather(*[engine.generate(prompt, GREEDY) for prompt in batch])
    found = [result.token_ids for result in results]
    assert found == greedy_each(oracle, batch, TOKENS, found)
