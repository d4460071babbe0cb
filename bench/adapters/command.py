"""``python -m bench adapters``: what LoRA adapters cost, beside the same model without them.

Random weights of a shape, and random adapters of all its linear layers. Steps of a batch are timed in which
all requests decode, in turns: by an engine without adapters (``off``), and by one with eight of them loaded,
where no request has one (``base``), all have the same (``one``), or each has another (``distinct``). Prompts
of ``--prompt`` tokens are timed one at a time. ``ratio`` is the median time over that of ``off``.

``loading``: the longest gap between two tokens of streams in windows in which an adapter is loaded, and in
windows as long in which none is, in turns; both end with the same number of further tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.llm import LLM
from aioinfer.params import SamplingParams
from bench.adapters.files import write_adapter
from bench.gpu.shapes import SHAPES, write_model
from bench.report import Report

#: adapters that are loaded
_MANY = 8
_PROMPT = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="0.6b", choices=list(SHAPES))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=60, help="timed steps of each way")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of timed prompts; 0: none")
    parser.add_argument("--prompts", type=int, default=6, help="timed prompts of each way")
    parser.add_argument(
        "--loads", type=int, default=24, help="windows in which an adapter is loaded; 0: none"
    )
    parser.add_argument("--threads", type=int, default=0, help="0: one a core")


def run(options: argparse.Namespace, report: Report) -> None:
    """See the module."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as opened:
        folder = Path(name)
        shape = SHAPES[options.shape]
        model = write_model(shape, folder / "model")
        paths = [
            write_adapter(shape, folder / f"adapter-{number}", options.rank, seed=number)
            for number in range(_MANY)
        ]
        report.add(adapter_mib=sum(file.stat().st_size for file in paths[0].iterdir()) / 2**20)
        without = opened.enter_context(LLM(_config(model, options, adapters=0)))
        having = opened.enter_context(LLM(_config(model, options, adapters=_MANY)))
        for number, path in enumerate(paths):
            having.load_adapter(str(number), path)
        names = [str(number) for number in range(_MANY)]
        for batch in options.batches:
            ways = {
                "off": _Decoding(without, [None] * batch, options.steps),
                "base": _Decoding(having, [None] * batch, options.steps),
                "one": _Decoding(having, ["0"] * batch, options.steps),
            }
            if batch > 1:
                ways["distinct"] = _Decoding(
                    having, [names[row % _MANY] for row in range(batch)], options.steps
                )
            _compare(f"decode of {batch}", ways, report)
        if options.prompt:
            _compare_prompts(without, having, options, report)
        opened.close()
        if options.loads:
            asyncio.run(_loading(model, paths, options, report))


def _config(model: Path, options: argparse.Namespace, adapters: int) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        load_format="random",
        dtype=options.dtype,
        quantization=options.quantization,
        device="cpu",
        threads=options.threads or None,
        prefix_cache=False,
        max_running_requests=4 * max(options.batches),
        max_model_len=1024,
        chunk_size=max(options.prompt, 64),
        max_adapters=adapters,
        overlap_steps=0,
    )


class _Decoding:
    """Requests that decode, step by step; begun anew when they are about to end."""

    def __init__(self, llm: LLM, adapters: Sequence[str | None], steps: int) -> None:
        self._llm, self._adapters, self._left, self._steps = llm, adapters, 0, steps
        self._keys: list[int] = []

    def begin(self) -> None:
        params = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
        for row, adapter in enumerate(self._adapters):
            prompt = [(7 * at + 3 * row) % 1000 + 1 for at in range(_PROMPT)]
            self._keys.append(self._llm.add_request(prompt, params, adapter=adapter))
        for _ in range(3):
            self._llm.step()

    def time(self, count: int) -> list[float]:
        """Seconds of steps."""
        found = []
        for _ in range(count):
            start = time.perf_counter()
            self._llm.step()
            found.append(time.perf_counter() - start)
        return found

    def end(self) -> None:
        for key in self._keys:
            self._llm.abort(key)
        self._keys.clear()
        while self._llm.has_unfinished():
            self._llm.step()


def _compare(what: str, ways: dict[str, _Decoding], report: Report) -> None:
    """Runs of some steps each, in turns, forwards and backwards."""
    steps, run = next(iter(ways.values()))._steps, 5
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(-(-steps // run)):
        for way in sorted(ways, key=list(ways).index, reverse=turn % 2 == 1):
            ways[way].begin()
            times[way] += ways[way].time(run)
            ways[way].end()
    _report(what, times, report)


def _compare_prompts(without: LLM, having: LLM, options: argparse.Namespace, report: Report) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    ways = {"off": (without, None), "base": (having, None), "one": (having, "0")}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(options.prompts):
        for way in sorted(ways, key=list(ways).index, reverse=turn % 2 == 1):
            llm, adapter = ways[way]
            prompt = [(11 * at + turn) % 1000 + 1 for at in range(options.prompt)]
            start = time.perf_counter()
            llm.generate(prompt, params, adapter=adapter, progress=False)
            times[way].append(time.perf_counter() - start)
    _report(f"prefill of {options.prompt}", times, report)


def _report(what: str, times: dict[str, list[float]], report: Report) -> None:
    base = statistics.median(times["off"])
    for way, found in times.items():
        median = statistics.median(found)
        report.row(what=what, way=way, ms=1e3 * median, least=1e3 * min(found), ratio=median / base)


async def _loading(model: Path, paths: Sequence[Path], options: argparse.Namespace, report: Report) -> None:
    """Gaps of streams while adapters are loaded, and while none is, in turns."""
    config = dataclasses.replace(_config(model, options, adapters=_MANY), overlap_steps=None)
    seconds: list[float] = []
    worst: dict[str, list[float]] = {"quiet": [], "loading": []}
    async with Engine(config) as engine:
        gaps = _Gaps(engine, max(options.batches))
        async with asyncio.TaskGroup() as group:
            for row in range(gaps.streams):
                group.create_task(gaps.read(row))
            await gaps.settled()
            for number in range(options.loads):
                for way in sorted(worst, reverse=number % 2 == 1):
                    gaps.reset()
                    if way == "quiet":
                        await asyncio.sleep(statistics.median(seconds or [0.2]))
                    else:
                        start = time.perf_counter()
                        await engine.load_adapter(f"adapter-{number % 2}", paths[number % _MANY])
                        seconds.append(time.perf_counter() - start)
                    await gaps.settled()
                    worst[way].append(gaps.worst)
            gaps.stop = True
    for way, found in worst.items():
        report.row(
            what="loading",
            way=way,
            streams=gaps.streams,
            load_ms=1e3 * statistics.median(seconds),
            worst_gap_ms=1e3 * max(found),
            median_worst_ms=1e3 * statistics.median(found),
            p90_worst_ms=1e3 * statistics.quantiles(found, n=10)[-1] if len(found) > 1 else 1e3 * found[0],
        )


class _Gaps:
    """The longest time between two chunks of the same stream since :meth:`reset`."""

    def __init__(self, engine: Engine, streams: int) -> None:
        self._engine, self.streams = engine, streams
        self.worst, self.stop = 0.0, False
        self._chunks, self._wanted = 0, 0
        self._reached = asyncio.Event()

    def reset(self) -> None:
        self.worst = 0.0

    async def settled(self) -> None:
        """When every stream has had several more chunks."""
        self._wanted = self._chunks + 4 * self.streams
        self._reached.clear()
        await self._reached.wait()

    async def read(self, row: int) -> None:
        for prompt in self._prompts(row):
            last = 0.0
            async with self._engine.generate(prompt, _LONG) as stream:
                async for _ in stream:
                    now = time.perf_counter()
                    if last:
                        self.worst = max(self.worst, now - last)
                    last = now
                    self._chunks += 1
                    if self._chunks >= self._wanted:
                        self._reached.set()
                    if self.stop:
                        return

    def _prompts(self, row: int) -> Iterator[list[int]]:
        random = np.random.default_rng(row)
        while not self.stop:
            yield random.integers(1, 400, _PROMPT).tolist()


_LONG = SamplingParams(temperature=0, max_tokens=900, ignore_eos=True)
