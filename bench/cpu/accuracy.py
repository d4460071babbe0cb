"""``python -m bench cpu --accuracy``: what weights of 8 and 4 bits cost the bundled model.

Held-out questions of each of its tasks, answered greedily, and how far logprobs of prompt tokens are from
those that bfloat16 gives.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from bench.report import Report
from examples.training.tasks import TASKS, held_out

__all__ = ["measure_accuracy"]

WAYS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
    "float32": {"dtype": "float32"},
}


async def answers(settings: dict[str, Any], count: int, seed: int) -> tuple[dict[str, float], list[float]]:
    """The share of right answers by task, and logprobs of the prompts' tokens."""
    right, logprobs = {}, []
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    async with Engine(EngineConfig(device="cpu", **settings)) as engine:
        for task in [*TASKS, "second_turn"]:
            items = held_out(task, count, seed)
            results = await asyncio.gather(*(engine.generate(item.messages, params) for item in items))
            right[task] = statistics.mean(
                item.check(result.text) for item, result in zip(items, results, strict=True)
            )
            entries = [entry for result in results for entry in result.prompt_logprobs or []]
            logprobs += [entry.logprob for entry in entries if entry is not None]
    return right, logprobs


def distance(some: Sequence[float], others: Sequence[float]) -> float:
    return statistics.mean(abs(one - other) for one, other in zip(some, others, strict=True))


def measure_accuracy(options: argparse.Namespace, report: Report) -> None:
    """A row per kind of weights: the share of right answers by task, and the distance of logprobs."""
    reference: list[float] | None = None
    for name, settings in WAYS.items():
        right, logprobs = asyncio.run(answers(settings, options.requests, options.seed))
        reference = reference or logprobs
        report.row(weights=name, **right, logprobs_apart=distance(logprobs, reference))
