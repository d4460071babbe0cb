"""``processors``: what a processor of one row of 32 costs the others."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from aioinfer.engine import Engine
from aioinfer.steering.processors import Ids, Logits, LogitsProcessor
from bench.report import Report, percentiles
from bench.sessions.setting import greedy, tokens
from bench.steering.setting import DEMO, config, tell

__all__ = ["Sample", "processors", "sample"]

_ROWS, _PROMPT = 32, 16
_BANNED = np.arange(3, 103)
_ASLEEP = 0.05


def _ban(ids: Ids, logits: Logits) -> None:
    logits[_BANNED] = -np.inf
    logits *= 0.8


async def _sleep(ids: Ids, logits: Logits) -> None:
    await asyncio.sleep(_ASLEEP)


#: of the first row
_WAYS: dict[str, list[LogitsProcessor]] = {"none": [], "plain": [_ban], "coroutine": [_sleep]}


class Sample(NamedTuple):
    """While all rows generate: tokens per second of the others, seconds between their tokens and between
    those of the first row."""

    rate: float
    gaps: list[float]
    own: list[float]


async def processors(options: argparse.Namespace, report: Report) -> None:
    """A row for each model and way; ratios are those of neighbours in time, to the way without processors."""
    for model in options.models:
        demo = model == DEMO
        output = 8 if options.quick else 256 if demo else 32
        rounds = options.rounds if demo else -(-options.rounds // 2)
        settings = config(
            model, options, max_running_requests=_ROWS, prefix_cache=False, num_pages=_ROWS * 20
        )
        found: dict[str, list[Sample]] = {way: [] for way in _WAYS}
        async with Engine(settings) as engine:
            for way in _WAYS:
                await _measure(engine, way, 4, 0)
            for number in range(1, rounds + 1):
                at = number % len(_WAYS)
                for way in [*_WAYS][at:] + [*_WAYS][:at]:
                    found[way].append(await _measure(engine, way, output, number))
        _tell(model, found, report)


def _tell(model: str, found: dict[str, list[Sample]], report: Report) -> None:
    plain = found["none"]
    losses = {}
    for way, samples in found.items():
        lost = [1 - one.rate / other.rate for one, other in zip(samples, plain, strict=True)]
        losses[way] = statistics.median(lost)
        gaps = percentiles([1e3 * gap for sample in samples for gap in sample.gaps])
        own = [gap for sample in samples for gap in sample.own]
        report.row(
            model=model,
            first_row=way,
            others_tok_s=statistics.median(sample.rate for sample in samples),
            lost_percent=100 * losses[way],
            least=100 * min(lost),
            most=100 * max(lost),
            itl_p50_ms=gaps["p50"],
            itl_p99_ms=gaps["p99"],
            own_ms_per_token=1e3 * statistics.mean(own) if own else None,
            rounds=len(samples),
            lost=lost,
        )
    for way, loss in losses.items():
        if way != "none":
            tell(report, f"{model}: {way}: % that others lose", 100 * loss, most=3)


async def _measure(engine: Engine, way: str, output: int, seed: int) -> Sample:
    """All rows at once, until the first of the others has ended."""
    prompts = [tokens(_PROMPT, 1000 * seed + row) for row in range(_ROWS)]
    own = engine.generate(prompts[0], greedy(output + _PROMPT, logits_processors=_WAYS[way]))
    others = [engine.generate(prompt, greedy(output)) for prompt in prompts[1:]]
    results = await asyncio.gather(*others)
    times = own.metrics.token_times
    own.close()
    return sample([result.metrics.token_times for result in results if result.metrics is not None], times)


def sample(others: Sequence[Sequence[float]], own: Sequence[float]) -> Sample:
    """From the times of tokens, those between the latest first token and the earliest last one of the
    others."""
    begin, end = max(each[0] for each in others), min(each[-1] for each in others)
    seen = [[at for at in each if begin <= at <= end] for each in others]
    tokens_behind = sum(at > begin for each in seen for at in each)
    return Sample(
        tokens_behind / (end - begin),
        [later - at for each in seen for at, later in itertools.pairwise(each)],
        [later - at for at, later in itertools.pairwise(at for at in own if begin <= at <= end)],
    )
