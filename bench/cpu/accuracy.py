"""``python -m bench cpu --accuracy``: what weights of 8 and 4 bits cost the bundled model, or another one.

For the bundled model: held-out questions of each of its tasks, answered greedily. For a model directory
(``--model``): the perplexity of this project's documentation, in windows of 512 tokens.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from bench.peers.registry import ROOT
from bench.report import Report
from examples.training.tasks import TASKS, held_out

__all__ = ["measure_accuracy", "measure_perplexity"]

#: tokens
_WINDOW = 512

WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "float32": {"dtype": "float32"},
}


async def answers(settings: dict[str, Any], count: int) -> dict[str, float]:
    """The share of right answers by task."""
    right = {}
    async with Engine(EngineConfig(device="cpu", **settings)) as engine:
        for task in [*TASKS, "second_turn"]:
            items = held_out(task, count, 0)
            params = SamplingParams(temperature=0)
            results = await asyncio.gather(*(engine.generate(item.messages, params) for item in items))
            right[task] = statistics.mean(
                item.check(result.text) for item, result in zip(items, results, strict=True)
            )
    return right


async def perplexity(settings: dict[str, Any], windows: Sequence[Sequence[int]]) -> float:
    """Perplexity of all tokens but the first of each window."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    async with Engine(EngineConfig(device="cpu", **settings)) as engine:
        results = await asyncio.gather(*(engine.generate(list(ids), params) for ids in windows))
    entries = [entry for result in results for entry in result.prompt_logprobs or []]
    return math.exp(-statistics.mean(entry.logprob for entry in entries if entry is not None))


def windows_of(model: Path, count: int) -> list[list[int]]:
    """Token ids of the documentation, at most ``count`` windows."""
    text = "\n".join(file.read_text() for file in sorted((ROOT / "docs").glob("*.md")))
    ids = Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids
    return [ids[at : at + _WINDOW] for at in range(0, len(ids) - _WINDOW, _WINDOW)][:count]


def measure_perplexity(count: int, model: Path, report: Report) -> None:
    """Report a row per kind of weights; ``more`` is the share above the perplexity of bfloat16."""
    windows = windows_of(model, count)
    first: float | None = None
    for name, settings in WAYS.items():
        found = asyncio.run(perplexity({"model": str(model), **settings}, windows))
        first = first or found
        report.row(weights=name, perplexity=found, more=found / first - 1)


def measure_accuracy(count: int, report: Report) -> None:
    """Report a row per kind of weights: the share of right answers by task."""
    for name, settings in WAYS.items():
        report.row(weights=name, **asyncio.run(answers(settings, count)))
