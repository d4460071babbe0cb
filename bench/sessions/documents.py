"""``rag``: conversations over documents that do not fit into the pool together, with and without a tier."""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from bench.report import Report, percentiles
from bench.sessions.setting import greedy, median, settings, tokens, ttft, warm_up

__all__ = ["rag"]

_QUESTION, _ANSWER, _CONCURRENCY = 32, 16, 2
#: share of all conversations that the pool has room for
_ROOM = 0.25

_Found = dict[str, float]


async def rag(options: argparse.Namespace, report: Report) -> None:
    """A row without and one with the tier: answers per second of all turns, and of all but the first, which
    must be computed in any case; then their ratios."""
    runs: dict[str, list[_Found]] = {"off": [], "on": []}
    differing = 0
    for number in range(options.rounds):
        outputs = {}
        for tier in ("off", "on") if number % 2 else ("on", "off"):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                found, outputs[tier] = await _run(options, folder if tier == "on" else None, number)
                runs[tier].append(found)
        differing += sum(one != other for one, other in zip(outputs["off"], outputs["on"], strict=True))
    for tier, each in runs.items():
        report.row(tier=tier, **median(each))
    ratios = [
        {name: on[name] / off[name] for name in ("answers_per_s", "later_per_s")}
        for on, off in zip(runs["on"], runs["off"], strict=True)
    ]
    report.row(tier="on / off", **median(ratios))
    report.fact("documents", options.documents)
    report.fact("document_tokens", options.document_tokens)
    report.fact("answers_that_differ", differing)
    if differing and options.deterministic:
        report.error(f"{differing} answers differ")


async def _run(options: argparse.Namespace, folder: str | None, seed: int) -> tuple[_Found, list[list[int]]]:
    """Figures, and the ids of all answers."""
    longest = options.document_tokens + options.questions * (_QUESTION + _ANSWER)
    pool = max(int(_ROOM * options.documents), _CONCURRENCY) * longest + 64
    given = settings(options, pool, prefix_cache_dir=folder, max_running_requests=_CONCURRENCY)
    histories = [tokens(options.document_tokens, 1000 * seed + number) for number in range(options.documents)]
    results: list[list[Result]] = []
    gate = asyncio.Semaphore(_CONCURRENCY)

    async def ask(number: int, turn: int) -> Result:
        async with gate:
            history = histories[number]
            history += tokens(_QUESTION, 1000 * seed + 100 * turn + number + 500)
            result = await engine.generate(history, greedy(_ANSWER))
            history += result.token_ids
            return result

    async with Engine(EngineConfig(**given)) as engine:
        await warm_up(engine)
        ends = [time.perf_counter()]
        for turn in range(options.questions):
            order = random.Random(100 * seed + turn).sample(range(options.documents), options.documents)
            results.append(await asyncio.gather(*[ask(number, turn) for number in order]))
            ends.append(time.perf_counter())
        hit_rate = engine.stats().hit_rate
    later = [ttft(result) for turn in results[1:] for result in turn]
    found = {
        "answers_per_s": options.documents * options.questions / (ends[-1] - ends[0]),
        "later_per_s": options.documents * (options.questions - 1) / (ends[-1] - ends[1]),
        "first_turn_s": ends[1] - ends[0],
        "later_ttft_ms_p50": 1e3 * percentiles(later)["p50"],
        "hit_rate": hit_rate,
    }
    return found, [result.token_ids for turn in results for result in turn]
