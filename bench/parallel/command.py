"""``python -m bench parallel``: what several engines that look like one bring, and what they cost.

``policies``  three workloads under each policy, on toy devices in virtual time with a model of their cost:
              TTFT and the share of prompts in prefix caches. Scheduler and cache are the real ones
``cost``      an engine alone and one under a dispatcher, in turns: the loop's time per token of many
              streams, and the time to the first token where there is nothing else to do
``failover``  from the loss of a device to the next token of its stream, and what of it is prefill
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from typing import Any

from aioinfer.client.engine_like import EngineLike
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import DeviceLost, Flight
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.policies import POLICIES
from aioinfer.params import SamplingParams
from bench.null_device import MAX_TOKENS, null_engine
from bench.parallel.workloads import WORKLOADS, run_workload
from bench.report import Report, percentiles


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(_PARTS), nargs="+", default=list(_PARTS))
    parser.add_argument("--workloads", choices=list(WORKLOADS), nargs="+", default=list(WORKLOADS))
    parser.add_argument("--replicas", type=int, default=8, help="of policies")
    parser.add_argument("--seeds", type=int, default=3, help="of policies")
    parser.add_argument("--streams", type=int, default=256, help="of cost")
    parser.add_argument("--seconds", type=float, default=3.0, help="of every measurement of cost")
    parser.add_argument("--rounds", type=int, default=5)


def run(options: argparse.Namespace, report: Report) -> None:
    """A section per part."""
    for name in options.only:
        title, part = _PARTS[name]
        part(options, report.section(name, title))


def _policies(options: argparse.Namespace, report: Report) -> None:
    for workload in options.workloads:
        for policy in POLICIES:
            runs = [run_workload(workload, policy, options.replicas, seed) for seed in range(options.seeds)]
            ttft = [percentiles(each["ttft"]) for each in runs]
            report.row(
                workload=workload,
                policy=policy,
                ttft_ms_p50=1e3 * statistics.median(each["p50"] for each in ttft),
                ttft_ms_p99=1e3 * statistics.median(each["p99"] for each in ttft),
                hit_rate=statistics.median(each["hit_rate"] for each in runs),
            )


def _cost(options: argparse.Namespace, report: Report) -> None:
    loop: dict[str, list[float]] = {"engine": [], "dispatcher": []}
    firsts: dict[str, list[float]] = {"engine": [], "dispatcher": []}
    for _ in range(options.rounds):
        for way in loop:
            loop[way].append(asyncio.run(_loop_time(way, options.streams, options.seconds)))
            firsts[way] += asyncio.run(_first_tokens(way))
    for way, each in loop.items():
        report.row(
            way=way,
            streams=options.streams,
            us_per_token=statistics.median(each),
            ttft_ms_p50=1e3 * percentiles(firsts[way])["p50"],
            ttft_ms_p99=1e3 * percentiles(firsts[way])["p99"],
        )


def _given(way: str, streams: int, step_ms: float) -> EngineLike:
    engine, _ = null_engine(streams, step_ms)
    return engine if way == "engine" else Dispatcher([engine])


async def _loop_time(way: str, streams: int, seconds: float) -> float:
    """Microseconds of the loop's thread per token."""
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)

    async def read(number: int) -> None:
        async with given.generate([number % 256, 5, 5, 5], params) as stream:
            async for _ in stream:
                pass

    async with _given(way, streams, 6.0) as given:
        gc.freeze()
        reading = [asyncio.create_task(read(number)) for number in range(streams)]
        await asyncio.sleep(1.0)
        tokens, spent = given.stats().output_tokens, time.thread_time()
        await asyncio.sleep(seconds)
        tokens, spent = given.stats().output_tokens - tokens, time.thread_time() - spent
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        gc.unfreeze()
    return 1e6 * spent / tokens


async def _first_tokens(way: str) -> list[float]:
    """Seconds to the first token, request by request."""
    seconds = []
    async with _given(way, 8, 1.0) as given:
        for number in range(120):
            start = time.perf_counter()
            async with given.generate([number, 5, 5, 5], SamplingParams(max_tokens=8)) as stream:
                await anext(stream)
                seconds.append(time.perf_counter() - start)
            await asyncio.sleep(0.003)
    return seconds[20:]


class _Losable(TorchDevice):
    """A device that is lost when it is told so."""

    lost = False

    def launch(self, prepared: Any) -> Flight:
        if self.lost:
            raise DeviceLost("for the bench")
        return super().launch(prepared)

    def check(self) -> None:
        if self.lost:
            raise DeviceLost("for the bench")


def _failover(options: argparse.Namespace, report: Report) -> None:
    for tokens in (8, 64):
        found = [asyncio.run(_lose_one(tokens)) for _ in range(options.rounds)]
        pause, prefill = (statistics.median(each) for each in zip(*found, strict=True))
        report.row(
            output_tokens=tokens,
            pause_ms=1e3 * pause,
            prefill_ms=1e3 * prefill,
            worst_ms=1e3 * max(pause for pause, _ in found),
        )


async def _lose_one(tokens: int) -> tuple[float, float]:
    """Seconds from the loss of a stream's device after ``tokens`` tokens to its next one, and of a prompt of
    that length to its first token."""
    params = SamplingParams(max_tokens=tokens + 16, ignore_eos=True, seed=1, speculate=False)
    prompt = [number % 200 + 10 for number in range(200)]
    devices: list[_Losable] = []

    def launcher(config: EngineConfig) -> ThreadLauncher:
        devices.append(_Losable(config))
        return ThreadLauncher(devices[-1])

    engines = [
        Engine(EngineConfig(threads=1, device="cpu", prefix_cache=False), launcher=launcher) for _ in range(2)
    ]
    async with Dispatcher(engines) as dispatcher:
        await asyncio.gather(*[dispatcher.generate(prompt, params) for _ in range(2)])
        stream, read = dispatcher.generate(prompt, params), 0
        while read < tokens:
            read += len((await anext(stream)).token_ids)
        busy = next(at for at, engine in enumerate(engines) if engine.stats().running)
        devices[busy].lost = True
        # The longest gap: tokens of steps in flight still come.
        pause, last = 0.0, time.perf_counter()
        async for _ in stream:
            pause, last = max(pause, time.perf_counter() - last), time.perf_counter()
        assert dispatcher.stats().resumed == 1
        known = [*prompt, *stream.result().token_ids[:read]]
        start = time.perf_counter()
        async with dispatcher.generate(known, params) as again:
            await anext(again)
            return pause, time.perf_counter() - start


_PARTS = {
    "policies": ("policies by workload, in virtual time", _policies),
    "cost": ("the loop's time per token and the time to the first token, in turns", _cost),
    "failover": ("from the loss of a device to the next token", _failover),
}
