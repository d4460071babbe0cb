"""Engines on CUDA with weights, experts, keys and values of 8 bits. Needs a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from tests.model.test_float8_experts import write
from tests.model.test_oracle import GREEDY, prompts

pytestmark = pytest.mark.gpu

SMALL = [{"quantization": "fp8"}, {"kv_dtype": "fp8"}, {"quantization": "fp8", "kv_dtype": "fp8"}]
#: an emulated device interprets routers, token by token of the largest step
FEW = {"prefill_graph_tokens": 8, "max_step_tokens": 16, "max_running_requests": 4}


@pytest.mark.parametrize(
    ("family", "small"),
    [*(("qwen3", each) for each in SMALL), ("qwen3-moe", SMALL[0])],
    ids=["weights", "kv", "both", "experts"],
)
async def test_ids_depend_neither_on_graphs_nor_on_overlap(
    checkpoint: Callable[[str], tuple[Path, Any]], family: str, small: dict[str, Any]
) -> None:
    path, _ = checkpoint(family)
    batch, seen = prompts(2, 7), []
    size = 256 if family == "qwen3" else 4
    more: dict[str, Any] = {} if family == "qwen3" else FEW
    for rows, window in ((0, 0), (size, 0), (size, 2)):
        config = EngineConfig(
            model=str(path), dtype="float32", device="cuda", num_pages=64, page_size=8, chunk_size=6,
            decode_graph_rows=rows, overlap_steps=window, **small, **more,
        )  # fmt: skip
        async with Engine(config) as engine:
            results = await asyncio.gather(*[engine.generate(prompt, GREEDY) for prompt in batch])
        seen.append([result.token_ids for result in results])
    assert seen[0] == seen[1] == seen[2]


async def test_experts_that_are_replaced_are_those_that_graphs_read(tmp_path: Path) -> None:
    """Kept as they are stored, one by one and in blocks; then others, from a directory."""
    one, two = (write(tmp_path / str(seed), "blocks", seed) for seed in (1, 2))
    batch, seen = prompts(2, 7), []
    options: dict[str, Any] = {"dtype": "float32", "device": "cuda", "num_pages": 64, "page_size": 8}
    options |= {"decode_graph_rows": 4, "chunk_size": 6, **FEW}
    for path in (one, two):
        async with Engine(EngineConfig(model=str(path), **options)) as engine:
            for update in (False, True):
                if update:
                    await engine.update_weights(two)
                results = await asyncio.gather(*[engine.generate(prompt, GREEDY) for prompt in batch])
                seen.append([result.token_ids for result in results])
    assert seen[0] != seen[1]
    assert seen[1] == seen[2] == seen[3]
