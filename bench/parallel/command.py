"""``python -m bench parallel``: what several engines that look like one bring, and what they cost.

    python -m bench parallel
    python -m bench parallel --only policies

``policies``  five workloads under each policy, on toy devices in virtual time with a model of their cost:
              TTFT, the time of all requests, the share of prompts in prefix caches. Real scheduler and cache
``rows``      the loop's time per token of an engine alone and of one behind a dispatcher, in turns
``ttft``      what a dispatcher adds to the time to the first token of an engine that has nothing to do
``failover``  from the loss of an engine to the next token of its streams, and what of it is prefill
``sockets``   engines over a null device in child processes: one and four of them, and what their frames cost
              the loop in front of them
``remote``    what a child process adds to the time to the first token
``noticing``  from the death of a child process, or from when it stands still, until that is known
``memory``    of four replicas of the shape of Qwen3-0.6B that share packed weights
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.engine_like import EngineLike
from aioinfer.execution.device import DeviceLost
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.policies import POLICIES
from aioinfer.parallel.record import Record
from aioinfer.params import SamplingParams
from bench.fanout.target import MAX_TOKENS
from bench.parallel import sockets
from bench.parallel.workloads import WORKLOADS
from bench.parallel.workloads import run as run_virtual
from bench.report import Report, percentiles

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(_PARTS), nargs="+", default=list(_PARTS))
    parser.add_argument("--replicas", type=int, default=8, help="of policies")
    parser.add_argument("--seeds", type=int, default=3, help="of policies")
    parser.add_argument("--streams", type=int, default=256, help="of rows")
    parser.add_argument("--seconds", type=float, default=3.0, help="of every measurement of rows")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--place", default="place", help="directory for the checkpoint of memory")


def run(options: argparse.Namespace, report: Report) -> None:
    """A section per part."""
    for name in options.only:
        title, part = _PARTS[name]
        part(options, report.section(name, title))


def _policies(options: argparse.Namespace, report: Report) -> None:
    for workload in WORKLOADS:
        found: dict[str, list[dict[str, Any]]] = {
            policy: [run_virtual(workload, policy, options.replicas, seed) for seed in range(options.seeds)]
            for policy in POLICIES
        }
        p50 = {
            policy: statistics.median(percentiles(each["ttft"])["p50"] for each in runs)
            for policy, runs in found.items()
        }
        best, in_turn = min(p50.values()), p50["round_robin"]
        for policy, runs in found.items():
            report.row(
                workload=workload,
                policy=policy,
                ttft_ms_p50=1e3 * p50[policy],
                ttft_ms_p99=1e3 * statistics.median(percentiles(each["ttft"])["p99"] for each in runs),
                of_best=best / p50[policy],
                of_round_robin=in_turn / p50[policy],
                seconds=statistics.median(each["seconds"] for each in runs),
                hit_rate=statistics.median(each["hit_rate"] for each in runs),
                max_of_mean=statistics.median(each["max_of_mean"] for each in runs),
            )


def _rows(options: argparse.Namespace, report: Report) -> None:
    found: dict[str, list[float]] = {"engine": [], "dispatcher": []}
    for _ in range(options.rounds):
        for way in found:
            found[way].append(asyncio.run(_loop_time(options, way)))
    alone, behind = (statistics.median(each) for each in found.values())
    report.row(streams=options.streams, engine_us=alone, dispatcher_us=behind, added_us=behind - alone)


async def _loop_time(options: argparse.Namespace, way: str) -> float:
    """Microseconds of the loop's thread per token."""
    engine = sockets.null_engine(options.streams, 6.0)
    given: EngineLike = engine if way == "engine" else Dispatcher([engine])
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)

    async def read(number: int) -> None:
        async with given.generate([number % 256, 5, 5, 5], params) as stream:
            async for _ in stream:
                pass

    async with given:
        gc.freeze()
        reading = [asyncio.create_task(read(number)) for number in range(options.streams)]
        await asyncio.sleep(1.0)
        tokens, spent = given.stats().output_tokens, time.thread_time()
        await asyncio.sleep(options.seconds)
        tokens, spent = given.stats().output_tokens - tokens, time.thread_time() - spent
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        gc.unfreeze()
    return 1e6 * spent / tokens


def _ttft(options: argparse.Namespace, report: Report) -> None:
    async def behind() -> list[float]:
        async with Dispatcher([sockets.null_engine(8, 1.0)]) as dispatcher:
            return await sockets.each_first(dispatcher)

    sockets.compare_first(options, report, "dispatcher", behind)


def _failover(options: argparse.Namespace, report: Report) -> None:
    for tokens in (8, 64):
        pauses, prefills = [], []
        for _ in range(options.rounds):
            pause, prefill = asyncio.run(_lose_one(tokens))
            pauses.append(pause)
            prefills.append(prefill)
        pause, prefill = statistics.median(pauses), statistics.median(prefills)
        report.row(
            output_tokens=tokens,
            pause_ms=1e3 * pause,
            prefill_ms=1e3 * prefill,
            beyond_ms=1e3 * (pause - prefill),
            worst_ms=1e3 * max(pauses),
        )


async def _lose_one(tokens: int) -> tuple[float, float]:
    """Seconds from the loss of the engine of a stream with so many tokens to its next one, and of a prompt
    of that length to its first."""
    params = SamplingParams(max_tokens=tokens + 16, ignore_eos=True, seed=1, speculate=False)
    prompt = [number % 200 + 10 for number in range(200)]
    engines = [Engine(EngineConfig(threads=1, prefix_cache=False)) for _ in range(2)]
    async with Dispatcher(engines) as dispatcher:
        await asyncio.gather(*[dispatcher.generate(prompt, params) for _ in range(2)])
        stream, read = dispatcher.generate(prompt, params), 0
        while read < tokens:
            read += len((await anext(stream)).token_ids)
        record = stream.cell.request
        assert isinstance(record, Record)
        assert record.attempt is not None
        lost: Any = record.attempt.replica
        start = time.perf_counter()
        lost.engine._runtime.lost(DeviceLost("for the bench"))
        await anext(stream)
        pause = time.perf_counter() - start
        await stream
        known = [*prompt, *stream.result().token_ids[:read]]
        start = time.perf_counter()
        async with dispatcher.generate(known, params) as again:
            await anext(again)
            return pause, time.perf_counter() - start


_PARTS = {
    "policies": ("policies by workload, in virtual time", _policies),
    "rows": ("the loop's time per token, in turns", _rows),
    "ttft": ("time to the first token, in turns", _ttft),
    "failover": ("from the loss of an engine to the next token", _failover),
    "sockets": ("replicas in child processes", sockets.together),
    "remote": ("time to the first token in a child process, in turns", sockets.first_tokens),
    "noticing": ("until the loss of a child process is known", sockets.loss),
    "memory": ("memory of four replicas, shared pages once", sockets.memory),
}
