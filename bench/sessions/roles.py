"""``disaggregation``: a process that prefills and one that decodes, a core each, against two mixed ones."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import time
from pathlib import Path
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.parallel import Dispatcher
from bench.load import LoadRequest, Record, engine_ask
from bench.peers.watch import tree
from bench.report import Report, percentiles
from bench.sessions.setting import median, pin, settings, tokens

__all__ = ["disaggregation"]

_WAYS: dict[str, dict[str, Any]] = {"mixed": {}, "disaggregated": {"roles": ["prefill", "decode"]}}
#: tokens of the prompt and the answer of a chat, and of the answer to a long prompt
_CHAT, _ANSWER = (64, 128), 16


async def disaggregation(options: argparse.Namespace, report: Report) -> None:
    """A row for each way: gaps between tokens of chats while long prompts are under way, and times to first
    tokens; then the ratios."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in _WAYS}
    for number in range(options.rounds):
        for way in [*_WAYS][:: -1 if number % 2 else 1]:
            runs[way].append(await _run(options, way, number))
    for way, found in runs.items():
        report.row(way=way, **median(found))
    pairs = zip(runs["disaggregated"], runs["mixed"], strict=True)
    ratios = [{name: own[name] / other[name] for name in own if other[name]} for own, other in pairs]
    report.row(way="ratio", **median(ratios))
    report.fact("long_prompts", options.long_prompts)
    report.fact("long_tokens", options.long_tokens)


async def _run(options: argparse.Namespace, way: str, seed: int) -> dict[str, float]:
    positions = 2 * (options.long_prompts * options.long_tokens + options.chats * sum(_CHAT)) + 1024
    config = EngineConfig(**settings(options, positions, threads=1, max_running_requests=32))
    async with Dispatcher(processes=2, config=config, **_WAYS[way]) as dispatcher:
        _pin_children()
        ask = engine_ask(dispatcher)
        await asyncio.gather(*[ask(_request(40, (1 << 40) + at, 8), Record()) for at in range(4)])
        chats: list[Record] = []

        async def chat(lane: int) -> None:
            for turn in itertools.count():
                chats.append(Record(sent=time.perf_counter()))
                await ask(_request(_CHAT[0], 10_000 * seed + 100 * lane + turn, _CHAT[1]), chats[-1])

        async def prompt(number: int) -> Record:
            await asyncio.sleep(number * options.every)
            record = Record(sent=time.perf_counter())
            await ask(_request(options.long_tokens, 10_000 * seed + 9000 + number, _ANSWER), record)
            return record

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(chat(lane)) for lane in range(options.chats)]
            begin = time.perf_counter()
            prompts = await asyncio.gather(*[prompt(number) for number in range(options.long_prompts)])
            end = time.perf_counter()
            for task in tasks:
                task.cancel()
        stats = dispatcher.stats()
    gaps = [
        now - before
        for record in chats
        for (before, _), (now, _) in itertools.pairwise(record.arrivals)
        if now > begin and before < end
    ]
    own = percentiles([1e3 * each for each in gaps])
    first = percentiles([1e3 * record.ttft for record in prompts])
    chat_first = percentiles([1e3 * record.ttft for record in chats if record.arrivals])
    return {
        "itl_ms_p50": own["p50"],
        "itl_ms_p99": own["p99"],
        "itl_ms_max": own["max"],
        "ttft_ms_p50": first["p50"],
        "ttft_ms_max": first["max"],
        "chat_ttft_ms_p50": chat_first["p50"],
        "chat_tokens_per_s": len(gaps) / (end - begin),
        "handovers": stats.handovers,
        "without_pages": stats.handovers_without_pages,
    }


def _request(count: int, seed: int, output: int) -> LoadRequest:
    return LoadRequest(0.0, tokens(count, seed), output)


def _pin_children() -> None:
    """Each replica's process on a core of its own."""
    cores = sorted(os.sched_getaffinity(0))
    children = [pid for pid in tree(os.getpid()) if b"replica" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid, core in zip(children, itertools.cycle(cores), strict=False):
        pin(pid, {core})
