"""The CUDA device: the same tokens as transformers, with the host running ahead. Needs a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from tests.model.checkpoints import greedy
from tests.model.test_oracle import GREEDY, TOKENS, prompts

pytestmark = pytest.mark.gpu


def config(path: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        model=str(path), dtype="float32", device="cuda", num_pages=64, page_size=8, chunk_size=6, **changes
    )


FAMILIES = ["llama-gqa-tied", "mistral-window", "qwen2", "qwen3", "qwen3-moe", "gpt2", "gemma2", "gemma3"]
FAMILIES += ["gemma4-shared", "gemma4-experts", "olmo3", "glm4", "smollm3"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("window", "mode"), [(0, "thread"), (1, "thread"), (2, "thread"), (1, "inline")])
async def test_greedy_ids_equal_transformers(
    checkpoint: Callable[[str], tuple[Path, Any]], family: str, window: int, mode: str
) -> None:
    path, oracle = checkpoint(family)
    batch = prompts(2, 7)
    async with Engine(config(path, overlap_steps=window, launch_mode=mode)) as engine:
        results = await asyncio.gather(*[engine.generate(prompt, GREEDY) for prompt in batch])
    assert [result.token_ids for result in results] == [greedy(oracle, prompt, TOKENS) for prompt in batch]


async def test_seeded_sampling_and_penalties_do_not_depend_on_the_window(
    checkpoint: Callable[[str], tuple[Path, Any]],
) -> None:
    path, _ = checkpoint("qwen3")
    requests = [
        (prompt, SamplingParams(seed=at, max_tokens=20, top_p=0.9, top_k=50, frequency_penalty=0.5))
        for at, prompt in enumerate(prompts(6, 6))
    ]
    seen = []
    for window in (0, 1, 2):
        async with Engine(config(path, overlap_steps=window)) as engine:
            results = await asyncio.gather(*[engine.generate(*request) for request in requests])
        seen.append([result.token_ids for result in results])
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize("experts", ["triton", "grouped"])
async def test_any_kernels_for_experts(checkpoint: Callable[[str], tuple[Path, Any]], experts: str) -> None:
    path, oracle = checkpoint("qwen3-moe-mixed")
    batch = prompts(2, 7)
    async with Engine(config(path, moe_backend=experts)) as engine:
        results = await asyncio.gather(*[engine.generate(prompt, GREEDY) for prompt in batch])
    assert [result.token_ids for result in results] == [greedy(oracle, prompt, TOKENS) for prompt in batch]
