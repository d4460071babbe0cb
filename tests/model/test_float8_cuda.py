"""Engines on CUDA with weights, keys and values of 8 bits. Needs a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from tests.model.test_oracle import GREEDY, prompts

pytestmark = pytest.mark.gpu

SMALL = [{"quantization": "fp8"}, {"kv_dtype": "fp8"}, {"quantization": "fp8", "kv_dtype": "fp8"}]


@pytest.mark.parametrize("small", SMALL, ids=["weights", "kv", "both"])
async def test_ids_depend_neither_on_graphs_nor_on_overlap(
    checkpoint: Callable[[str], tuple[Path, Any]], small: dict[str, Any]
) -> None:
    path, _ = checkpoint("qwen3")
    batch, seen = prompts(2, 7), []
    for rows, window in ((0, 0), (256, 0), (256, 2)):
        config = EngineConfig(
            model=str(path), dtype="float32", device="cuda", num_pages=64, page_size=8, chunk_size=6,
            decode_graph_rows=rows, overlap_steps=window, **small,
        )  # fmt: skip
        async with Engine(config) as engine:
            results = await asyncio.gather(*[engine.generate(prompt, GREEDY) for prompt in batch])
        seen.append([result.token_ids for result in results])
    assert seen[0] == seen[1] == seen[2]
