"""``best_of`` and ``fork``: what branches of one output cost in tokens, pages and time."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from aioinfer.config import PAGE_SIZE
from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from aioinfer.stream import Stream
from bench.report import Report, percentiles
from bench.sessions.setting import gap, greedy, tokens
from bench.steering.setting import config, tell

__all__ = ["best_of", "fork"]

_T = TypeVar("_T")
#: outputs of best_of, and how many forks are read to their first token
_WIDTH, _READ = 16, 20


async def best_of(options: argparse.Namespace, report: Report) -> None:
    """A row for one output and one for the best of 16: tokens of prompts that were computed, and the most
    pages in use at a time: all that could not be given to another request."""
    prompt, tail = options.prompt, options.tail
    positions = (_WIDTH + 2) * (prompt + tail)
    settings = config(
        options.models[-1], options, max_running_requests=_WIDTH, num_pages=positions // PAGE_SIZE
    )
    ideal = -(-prompt // PAGE_SIZE) + _WIDTH * -(-tail // PAGE_SIZE)
    computed, pages = 0, 0
    async with Engine(settings) as engine:
        await engine.generate(tokens(40, 1 << 40), greedy(4))
        for outputs in (1, _WIDTH):
            before = engine.stats().prefill_tokens
            params = SamplingParams(temperature=1, seed=1, max_tokens=tail, ignore_eos=True)
            start = time.perf_counter()
            found, pages = await _watched(engine, engine.best_of(tokens(prompt, outputs), params, n=outputs))
            computed = engine.stats().prefill_tokens - before
            report.row(
                outputs=outputs,
                different=len({tuple(each.result.token_ids) for each in found}),
                prompt=prompt,
                tail=tail,
                prefill_tokens=computed,
                peak_pages=pages,
                seconds=time.perf_counter() - start,
            )
    tell(report, f"best of {_WIDTH}: prefill tokens, of the prompt's", computed / prompt, most=1.15)
    tell(report, f"best of {_WIDTH}: pages, of one prompt and {_WIDTH} tails", pages / ideal, most=1.15)


async def _watched(engine: Engine, work: Coroutine[Any, Any, _T]) -> tuple[_T, int]:
    """What it returns, and the most pages in use meanwhile, at looks a millisecond apart."""
    task, most = asyncio.ensure_future(work), 0
    while not task.done():
        stats = engine.stats()
        most = max(most, stats.pages_total - stats.pages_free - stats.pages_evictable)
        await asyncio.wait([task], timeout=0.001)
    return await task, most


async def fork(options: argparse.Namespace, report: Report) -> None:
    """A row for a long prompt and one for a long output: a stream is forked at each chunk that is read, while
    it goes on. The child is closed at once; in the end some are read to their first token."""
    long, forks = options.fork_tokens, options.forks
    most = long + 2 * forks + 64 * _READ  # a stream goes on while others are read
    settings = config(options.models[-1], options, max_running_requests=4, num_pages=4 * most // PAGE_SIZE)
    asked: dict[str, float] = {}
    async with Engine(settings) as engine:
        for what, prompt in (("prompt", long - 16), ("output", 16)):
            stream = engine.generate(tokens(prompt, prompt), greedy(most - prompt))
            await _read(stream, long - prompt)
            times = [await _forked(stream) for _ in range(forks)]
            several = [await _forked(stream, _READ) for _ in range(min(_READ, forks))]
            first = [await _first_token(stream) for _ in range(min(_READ, forks))]
            found = percentiles(times)
            asked |= {f"{what}, {name}": found[name] for name in ("p50", "p99")}
            report.row(
                long=what,
                tokens=long,
                forks=len(times),
                us_p50=found["p50"],
                us_p99=found["p99"],
                us_max=found["max"],
                us_first=times[0],
                us_of_several=percentiles(several)["p50"],
                first_token_ms=percentiles(first)["p50"],
                step_ms=1e3 * gap(stream.result()),
            )
            stream.close()
    for what, value in asked.items():
        tell(report, f"fork of {long} tokens, long {what}: us", value, most=60)


async def _forked(stream: Stream, count: int = 1) -> float:
    """Microseconds of each of so many forks at the newest token, which is then read past."""
    start = time.perf_counter()
    children = stream.fork(count)
    took = 1e6 * (time.perf_counter() - start) / count
    for child in children:
        child.close()
    await _read(stream, 1)
    return took


async def _first_token(stream: Stream) -> float:
    """Milliseconds from a fork to the first token of its own."""
    start = time.perf_counter()
    (child,) = stream.fork()
    await _read(child, 1)
    child.close()
    return 1e3 * (time.perf_counter() - start)


async def _read(stream: Stream, count: int) -> None:
    """Read at least so many tokens. Raises RuntimeError if it ends before."""
    async for chunk in stream:
        count -= len(chunk.token_ids)
        if count <= 0:
            return
    raise RuntimeError("a stream ended that was to go on")
