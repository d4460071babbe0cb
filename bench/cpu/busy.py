"""``python -m bench cpu --busy``: how much a loop that has other work slows the forward beside it.

One engine decodes a batch; its loop's thread is idle in one half of the rounds and half busy in the other,
with bursts of pure Python: what an application around the engine might do. A forward that returns to Python
between its operations then waits for the interpreter every time; one that is a single call does not.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from bench.report import Report

__all__ = ["measure", "measure_busy"]

#: seconds of work, and of rest behind it
BURST = 0.002


async def burn() -> None:
    """Keep the loop busy for half of the time."""
    while True:
        end = time.perf_counter() + BURST
        while time.perf_counter() < end:
            pass
        await asyncio.sleep(BURST)


async def forward_ms(engine: Engine, batch: int, prompt: int, tokens: int, busy: bool) -> float:
    """Milliseconds of a forward, the mean over a batch's decodes.

    Raises SystemExit if all had been computed when the first tokens were read.
    """
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    other = asyncio.create_task(burn()) if busy else None
    try:
        streams = [engine.generate([100 + at] * prompt, params) for at in range(batch)]
        for stream in streams:
            await anext(stream)
        before = engine.timeline.overlap()
        await asyncio.gather(*streams)
        after = engine.timeline.overlap()
    finally:
        if other is not None:
            other.cancel()
            await asyncio.wait([other])
    steps = after.steps - before.steps
    if not steps:
        raise SystemExit("there was no forward left to measure: ask for more --output-tokens")
    return 1e3 * (after.busy - before.busy) / steps


async def measure(config: EngineConfig, batch: int, prompt: int, tokens: int, rounds: int) -> dict[str, Any]:
    """A forward with the loop idle and busy, in turns, the median of each."""
    times: dict[bool, list[float]] = {False: [], True: []}
    async with Engine(config) as engine:
        await forward_ms(engine, batch, prompt, tokens, False)
        for _ in range(rounds):
            for busy in (False, True):
                times[busy].append(await forward_ms(engine, batch, prompt, tokens, busy))
    idle, busy_ms = (statistics.median(times[key]) for key in (False, True))
    return {"idle_ms": idle, "busy_ms": busy_ms, "slower": busy_ms / idle - 1, "runs": times}


def measure_busy(options: argparse.Namespace, model: Path, report: Report) -> None:
    """A row per kernels and number of threads."""
    batch = options.concurrency[0] if len(options.concurrency) == 1 else 8
    for kernels in ("native", "sdpa"):
        for threads in range(1, options.threads + 1):
            config = EngineConfig(
                model=str(model), device="cpu", attention_backend=kernels, threads=threads, prefix_cache=False
            )
            line = asyncio.run(
                measure(config, batch, options.prompt_tokens, options.output_tokens, options.rounds)
            )
            report.row(kernels=kernels, threads=threads, batch=batch, **line)
