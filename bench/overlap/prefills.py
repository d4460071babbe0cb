"""Prefill steps behind one another: does TTFT gain when each is read before the next is planned?"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from contextlib import AsyncExitStack

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from bench.report import Report, percentiles

__all__ = ["bench_prefills"]

REQUESTS = 64
PROMPT = (64, 512)
OUTPUT = 16


async def bench_prefills(options: argparse.Namespace, path: str, report: Report) -> None:
    """With and without ``max_overlapped_prefill``: all requests at once, and at 70 % of that rate.

    Figures are those with the limit over those without it.
    """
    for mixed in (True, False):
        async with AsyncExitStack() as stack:
            engines = [
                await stack.enter_async_context(Engine(_config(options, path, mixed, overlap)))
                for overlap in (True, False)
            ]
            seconds = min([(await _run(engine, 0, None))["seconds"] for engine in engines])
            for load, rate in (("burst", None), ("poisson", 0.7 * REQUESTS / seconds)):
                rounds = [
                    [await _run(engine, number, rate) for engine in engines]
                    for number in range(options.rounds)
                ]
                ratios = {
                    name: statistics.median(without[name] / with_[name] for with_, without in rounds)
                    for name in ("ttft_p50", "ttft_p99", "tokens_per_s")
                }
                report.row(steps="mixed" if mixed else "not mixed", load=load, **ratios, rounds=rounds)


def _config(options: argparse.Namespace, path: str, mixed: bool, overlap: bool) -> EngineConfig:
    return EngineConfig(
        model=path,
        threads=options.threads,
        mixed=mixed,
        step_priority="decode" if mixed else "prefill",
        max_step_tokens=512,
        chunk_size=256,
        max_running_requests=32,
        prefix_cache=False,
        max_overlapped_prefill=options.most if not overlap else 1 << 20,
    )


async def _run(engine: Engine, seed: int, rate: float | None) -> dict[str, float]:
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)

    async def ask(prompt: list[int], at: float) -> Result:
        await asyncio.sleep(at - loop.time())
        return await engine.generate(prompt, params)

    arrival = loop.time()
    start, asking = time.perf_counter(), []
    for _ in range(REQUESTS):
        prompt = [rng.randint(100, 800) for _ in range(rng.randint(*PROMPT))]
        arrival += rng.expovariate(rate) if rate else 0.0
        asking.append(ask(prompt, arrival))
    results = await asyncio.gather(*asking)
    seconds = time.perf_counter() - start
    waits = percentiles([_ttft(result) for result in results])
    return {
        "seconds": seconds,
        "tokens_per_s": REQUESTS * OUTPUT / seconds,
        "ttft_p50": waits["p50"],
        "ttft_p99": waits["p99"],
    }


def _ttft(result: Result) -> float:
    metrics = result.metrics
    assert metrics is not None
    assert metrics.ttft is not None
    return metrics.ttft
