"""``aioinfer bench``: how fast this machine serves a model, measured in this process without HTTP.

Requests of random token ids, ``--concurrency`` at a time. It shows what an installed package can do; the
benchmarks of the repository compare.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import Sequence
from typing import Any

from aioinfer.cli.flags import read_settings
from aioinfer.cli.streams import note, write
from aioinfer.cli.terminal import Progress
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams

__all__ = ["bench"]

_SEED = 7


async def bench(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    from aioinfer.engine import Engine

    for name in ("requests", "concurrency", "prompt_tokens", "output_tokens"):
        if not 1 <= getattr(options, name) <= 1_000_000:
            raise ConfigError(f"--{name.replace('_', '-')} must be from 1 to 1000000")
    engine = Engine(read_settings(EngineConfig, options))
    await engine.start(Progress())
    async with contextlib.aclosing(engine):
        if options.prompt_tokens + options.output_tokens > engine.info.max_model_len:
            most = engine.info.max_model_len
            raise ConfigError(f"prompt and output exceed the context of the model, {most} tokens")
        await _run(engine, options, requests=min(options.concurrency, 4))  # warms up
        started = time.perf_counter()
        results = await _run(engine, options, requests=options.requests)
        seconds = time.perf_counter() - started
        for name, value in _figures(results, seconds).items():
            write(f"{name:24} {value}")
        write(f"{'engine':24} {engine.info.description}")
        if options.trace is not None:
            trace = await asyncio.to_thread(engine.timeline.chrome_trace)
            try:
                options.trace.write_text(trace)
            except OSError as error:
                note(f"aioinfer: {error}")
                return 1
            steps = sum(event["ph"] == "X" for event in json.loads(trace)["traceEvents"])
            write(f"{'trace':24} {steps} events in {options.trace}; open it at https://ui.perfetto.dev")
    return 0


async def _run(engine: Any, options: argparse.Namespace, requests: int) -> list[Result]:
    """``concurrency`` callers who ask one request after the other."""
    rng = random.Random(_SEED)
    vocabulary = engine.info.vocab_size
    prompts = [[rng.randrange(vocabulary) for _ in range(options.prompt_tokens)] for _ in range(requests)]
    params = SamplingParams(max_tokens=options.output_tokens, ignore_eos=True, temperature=0)
    results: list[Result] = []

    async def caller() -> None:
        while prompts:
            results.append(await engine.generate(prompts.pop(), params))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(options.concurrency, requests)):
            group.create_task(caller())
    return results


def _figures(results: Sequence[Result], seconds: float) -> dict[str, str]:
    firsts, gaps = [], []
    for result in results:
        assert result.metrics is not None
        times = result.metrics.token_times
        firsts.append(times[0] - result.metrics.arrival)
        if len(times) > 1:
            gaps.append((times[-1] - times[0]) / (len(times) - 1))
    prompt = sum(result.usage.prompt_tokens for result in results)
    output = sum(result.usage.completion_tokens for result in results)
    return {
        "requests": f"{len(results)} in {seconds:.2f} s",
        "prompt tokens/s": f"{prompt / seconds:.1f}",
        "output tokens/s": f"{output / seconds:.1f}",
        "first token, p50 p99 ms": _percentiles(firsts),
        "per token, p50 p99 ms": _percentiles(gaps),
    }


def _percentiles(values: list[float]) -> str:
    if not values:
        return "-"
    values = sorted(values)
    at = (values[min(len(values) - 1, int(share * len(values)))] for share in (0.5, 0.99))
    return " ".join(f"{1e3 * value:.2f}" for value in at)
