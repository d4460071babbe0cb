"""Streams beside which prompts arrive: the gaps between their tokens, and how fast the prompts are."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import Any

from bench.load import Load, LoadRequest, Record, Target, run_load
from bench.report import percentiles

__all__ = ["beside", "groups", "told"]

#: tokens of a stream: more than it gets before it is cancelled
_LONG = 4000
_PROMPT = 32


def groups(texts: list[str]) -> list[tuple[int, int]]:
    """Numbers and lengths of prompts from texts as ``4x900``. Raises ValueError."""
    found = [tuple(int(part) for part in text.split("x")) for text in texts]
    if not all(len(each) == 2 and min(each) > 0 for each in found):
        raise ValueError(f"not numbers and lengths of prompts: {texts}")
    return [(count, length) for count, length in found]


async def beside(
    ask: Target, streams: int, count: int, length: int, vocab: tuple[int, int], seed: int
) -> tuple[dict[str, Any], list[float]]:
    """Send ``count`` prompts at once beside streams that are under way, for one token each. Returns figures
    of the prompts, and the gaps of all streams until the last of these tokens, in seconds. Raises what a
    request raises, and RuntimeError for one that was refused."""
    rng = random.Random(seed)

    def some(tokens: int, output: int) -> LoadRequest:
        return LoadRequest(0.0, [rng.randint(*vocab) for _ in range(tokens)], output)

    async def stream(record: Record) -> None:
        await ask(some(_PROMPT, _LONG), record)

    records = [Record() for _ in range(streams)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream(each)) for each in records]
        if streams:  # a prompt that ends now was queued behind those of the streams
            await run_load(Load([some(_PROMPT, 24)], None), ask)
        found, _ = await run_load(Load([some(length, 1) for _ in range(count)], None), ask)
        for task in tasks:
            task.cancel()
    if errors := [each.error for each in [*found, *records] if each.error]:
        raise RuntimeError(errors[0])
    begin, end = min(each.sent for each in found), max(each.arrivals[-1][0] for each in found)
    gaps = [
        now - before
        for each in records
        for (before, _), (now, _) in itertools.pairwise(each.arrivals)
        if now > begin and before < end
    ]
    return {
        "prompt_tokens_per_s": count * length / (end - begin),
        "ttft_s_mean": sum(each.ttft for each in found) / count,
        "ttft_s_max": end - begin,
    }, gaps


def told(figures: list[dict[str, Any]], gaps: list[float]) -> dict[str, Any]:
    """A row: medians of the figures of all rounds, and percentiles of all gaps in milliseconds."""
    middle = {name: percentiles([each[name] for each in figures])["p50"] for name in figures[0]}
    found = percentiles([1e3 * gap for gap in gaps]) if gaps else {}
    return middle | {f"gap_ms_{at}": found.get(at) for at in ("p50", "p95", "p99", "max")}
