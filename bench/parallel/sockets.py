"""Replicas in child processes: what they do together, and what the loop in front of them spends."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from aioinfer.cli.terminal import loop_factory
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.engine_like import EngineLike
from aioinfer.parallel import Dispatcher, remote
from aioinfer.parallel.messages import StepRows
from aioinfer.params import SamplingParams
from bench.fanout.target import MAX_TOKENS, make_engine
from bench.report import Report, percentiles
from bench.speculation.pair import find_pair

__all__ = ["compare_first", "each_first", "first_tokens", "loss", "memory", "null_engine", "together"]

#: of a step, so long that four replicas and the loop in front of them share two cores
_STEP_MS = 20.0
_KV_GIB = 0.25
_Found = TypeVar("_Found")
_PARAMS = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)


def _run(work: Coroutine[Any, Any, _Found]) -> _Found:
    """On the loop of the command line."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(work)


@asynccontextmanager
async def _children(count: int, streams: int, step_ms: float) -> AsyncIterator[Dispatcher]:
    """A dispatcher of null devices in child processes, of so many streams each."""
    config = EngineConfig(prefix_cache=False, max_queued_requests=count * streams + 16)
    dispatcher = Dispatcher(processes=count, config=config, policy="total_requests")
    for replica in dispatcher._replicas:
        options = ["--streams", f"{streams}", "--step-ms", f"{step_ms}"]
        replica.command = [sys.executable, "-m", "bench.parallel.child", *options]  # type: ignore[attr-defined]
    async with dispatcher:
        yield dispatcher


async def _flow(given: EngineLike, streams: int, seconds: float, probe: Callable[[], None]) -> float:
    """Tokens per second of so many endless streams; ``probe`` is called when they are measured."""

    async def read(number: int) -> None:
        async with given.generate([number % 256, 5, 5, 5], _PARAMS) as stream:
            async for chunk in stream:
                tokens[0] += len(chunk.token_ids)

    tokens = [0]
    reading = [asyncio.create_task(read(number)) for number in range(streams)]
    await asyncio.sleep(1.5)
    gc.freeze()
    probe()
    before, start = tokens[0], time.perf_counter()
    await asyncio.sleep(seconds)
    rate = (tokens[0] - before) / (time.perf_counter() - start)
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    gc.unfreeze()
    return rate


class _Frames:
    """What the loop spends on frames: reading them, bringing rows to their records, waking readers."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.frames = self.rows = 0

    @contextmanager
    def watched(self) -> Iterator[None]:
        received = remote._Link.received

        def timed(link: remote._Link, message: Any) -> None:
            start = time.thread_time()  # the children want the same cores
            received(link, message)
            if isinstance(message, StepRows):
                self.seconds += time.thread_time() - start
                self.frames += 1
                self.rows += len(message.rows)

        setattr(remote._Link, "received", timed)  # noqa: B010
        try:
            yield
        finally:
            setattr(remote._Link, "received", received)  # noqa: B010

    def forget(self) -> None:
        """Begin to measure."""
        self.seconds, self.frames, self.rows = 0.0, 0, 0


def together(options: argparse.Namespace, report: Report) -> None:
    """Tokens per second of an engine in this process, of one replica, and of four; and the loop's time for
    their frames, whose parts per frame and per row follow from frames of two sizes."""
    costs = []
    for streams in (16, 64):
        found: dict[str, list[float]] = {"engine": [], "one": [], "four": []}
        frames = _Frames()
        for _ in range(options.rounds):
            for way, rates in found.items():
                rates.append(_run(_rate(way, streams, options.seconds, frames)))
        engine, one, four = (statistics.median(each) for each in found.values())
        size = frames.rows / frames.frames
        costs.append((size, 1e6 * frames.seconds / frames.frames))
        report.row(
            streams=streams,
            step_ms=_STEP_MS,
            engine_tok_s=engine,
            one_tok_s=one,
            four_tok_s=four,
            one_of_engine=one / engine,
            four_of_four=four / (4 * one),
            rows_of_frame=size,
            frame_us=costs[-1][1],
        )
    (fewer, cheap), (more, dear) = costs
    row = (dear - cheap) / (more - fewer)
    report.fact("us_per_row", row)
    report.fact("us_per_frame", cheap - fewer * row)


async def _rate(way: str, streams: int, seconds: float, frames: _Frames) -> float:
    if way == "engine":
        async with null_engine(streams, _STEP_MS) as engine:
            return await _flow(engine, streams, seconds, lambda: None)
    count = 1 if way == "one" else 4
    async with _children(count, streams, _STEP_MS) as dispatcher:
        if way == "one":
            return await _flow(dispatcher, streams, seconds, lambda: None)
        with frames.watched():
            return await _flow(dispatcher, 4 * streams, seconds, frames.forget)


def first_tokens(options: argparse.Namespace, report: Report) -> None:
    """Seconds to the first token of an engine that has nothing to do, here and in a child process."""

    async def in_a_child() -> list[float]:
        async with _children(1, 8, 1.0) as dispatcher:
            return await each_first(dispatcher)

    compare_first(options, report, "replica", in_a_child)


def compare_first(
    options: argparse.Namespace,
    report: Report,
    name: str,
    other: Callable[[], Coroutine[Any, Any, list[float]]],
) -> None:
    """What another way adds to the time to the first token of an engine alone, in turns."""

    async def alone() -> list[float]:
        async with null_engine(8, 1.0) as engine:
            return await each_first(engine)

    found: dict[str, list[float]] = {"engine": [], name: []}
    for _ in range(options.rounds):
        for seconds, way in zip(found.values(), (alone, other), strict=True):
            seconds += _run(way())
    times = {way: percentiles(seconds) for way, seconds in found.items()}
    report.row(
        **{f"{way}_ms_p50": 1e3 * each["p50"] for way, each in times.items()},
        added_ms_p50=1e3 * (times[name]["p50"] - times["engine"]["p50"]),
        **{f"{way}_ms_p99": 1e3 * each["p99"] for way, each in times.items()},
    )


async def each_first(given: EngineLike) -> list[float]:
    """Seconds to the first token, request by request."""
    seconds = []
    for number in range(200):
        start = time.perf_counter()
        async with given.generate([number, 5, 5, 5], SamplingParams(max_tokens=8)) as stream:
            await anext(stream)
            seconds.append(time.perf_counter() - start)
        await asyncio.sleep(0.003)
    return seconds[20:]


def loss(options: argparse.Namespace, report: Report) -> None:
    """How long it takes to notice that a child process is gone, or stands still."""
    for number in (signal.SIGKILL, signal.SIGSTOP):
        found = [1e3 * _run(_lose(number)) for _ in range(options.rounds)]
        report.row(signal=number.name, noticed_ms=statistics.median(found), worst_ms=max(found))


async def _lose(number: signal.Signals) -> float:
    async with _children(2, 8, 5.0) as dispatcher:
        reading = [dispatcher.generate([each, 5, 5], _PARAMS) for each in range(8)]
        for stream in reading:
            await anext(stream)
        lost: Any = dispatcher._replicas[0]
        assert dispatcher._running is not None
        noticed, after = asyncio.get_running_loop().create_future(), dispatcher._running.when_lost
        dispatcher._running.when_lost = lambda replica: noticed.set_result(time.perf_counter())
        start = time.perf_counter()
        os.kill(lost.pid, number)
        seconds: float = await noticed - start
        dispatcher._running.when_lost = after
        for stream in reading:
            await stream.aclose()
        return seconds


def memory(options: argparse.Namespace, report: Report) -> None:
    """What four replicas of the shape of Qwen3-0.6B have in memory, shared pages once."""
    target, _ = find_pair("0.6b", Path(options.place))
    weights = sum(path.stat().st_size for path in target.glob("*.safetensors")) / 2**30
    with tempfile.TemporaryDirectory() as cache:
        before = os.environ.get("AIOINFER_CACHE")
        os.environ["AIOINFER_CACHE"] = cache
        try:
            report.row(**_run(_memory(target, weights)))
        finally:
            if before is None:
                del os.environ["AIOINFER_CACHE"]
            else:
                os.environ["AIOINFER_CACHE"] = before


async def _memory(target: Path, weights: float) -> dict[str, Any]:
    config = EngineConfig(
        model=str(target), threads=1, cache_weights=True, kv_memory_gib=_KV_GIB, max_model_len=2048
    )
    async with Dispatcher(processes=4, config=config, policy="round_robin") as dispatcher:
        params = SamplingParams(max_tokens=16, ignore_eos=True)
        await asyncio.gather(*(dispatcher.generate([9] * 64, params) for _ in range(8)))
        children = [psutil.Process(replica.pid) for replica in dispatcher._replicas]  # type: ignore[attr-defined]
        shares = [each.memory_full_info() for each in children]
    pss = sum(each.pss for each in shares) / 2**30
    return {
        "weights_gib": weights,
        "kv_gib": 4 * _KV_GIB,
        "pss_gib": pss,
        "rss_of_each_gib": statistics.mean(each.rss for each in shares) / 2**30,
        "bound_gib": 1.3 * weights + 4 * _KV_GIB,
    }


def null_engine(streams: int, step_ms: float) -> Engine:
    """Whose steps take so long, and no processor."""
    given = argparse.Namespace(
        streams=streams, step_ms=step_ms, packing_ms=0.0, launching_ms=0.0, tokenizer=None
    )
    return make_engine(given)
