"""Launching: what a step costs the launch thread, by its kind.

An engine with default settings decodes a batch while prompts arrive one after the other, as they do in
serving. Of each launch the own time of the thread and the time that passed are kept, and whether the step
was a replay. A launch that is longer than the step on the device makes everybody in the step wait.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aioinfer.config import EngineConfig, parse_setting
from aioinfer.engine import Engine
from aioinfer.execution.device import Flight
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.params import SamplingParams
from bench.gpu.engines import run_async
from bench.gpu.plan import Plan
from bench.gpu.report import PartReport
from bench.gpu.shapes import SHAPES, write_model

__all__ = ["Timed", "run"]

#: launches of a kind that are left out: kernels are loaded, memory is taken
_FIRST = 3


@dataclass(slots=True)
class _Launches:
    """Of one kind of step; seconds."""

    passed: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    replays: int = 0


class Timed(TorchDevice):
    """Keeps the time of each launch, once it is asked to."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.timing = False
        #: by kind of step
        self.launches: dict[str, _Launches] = defaultdict(_Launches)

    def launch(self, prepared: Any) -> Flight:
        start, own = time.perf_counter(), time.thread_time()
        flight = super().launch(prepared)
        if self.timing:
            found = self.launches[_kind(prepared)]
            found.passed.append(time.perf_counter() - start)
            found.own.append(time.thread_time() - own)
            found.replays += getattr(prepared, "shape", None) is not None
        return flight


def _kind(prepared: Any) -> str:
    """Of a packed step."""
    decodes = prepared.num_decodes
    tokens = sum(prepared.q_lens) - decodes
    if not tokens:
        return f"{_rounded(decodes)} decodes"
    return (
        f"{_rounded(decodes)} decodes, {_rounded(tokens)} of prompts"
        if decodes
        else (f"{_rounded(tokens)} of prompts")
    )


def _rounded(count: int) -> str:
    """Up to a power of two."""
    return f"{1 << (count - 1).bit_length()}"


def run(plan: Plan, report: PartReport) -> None:
    """A row per kind of step."""
    run_async(_run(plan, report))


async def _run(plan: Plan, report: PartReport) -> None:
    size, shape = plan.size, SHAPES[plan.shape]
    with tempfile.TemporaryDirectory() as name:
        settings: dict[str, Any] = {"load_format": "random", "dtype": plan.dtype, "device": plan.device}
        if plan.device == "cpu":
            settings |= {"threads": 1, "num_pages": 256, "max_running_requests": 8}
        settings |= {key: parse_setting(EngineConfig, key, text) for key, text in plan.settings.items()}
        config = EngineConfig(model=str(write_model(shape, Path(name))), speculation="off", **settings)
        device = Timed(config)
        start = time.perf_counter()
        async with Engine(config, launcher=lambda _: ThreadLauncher(device)) as engine:
            report.fact("start_s", time.perf_counter() - start)
            for device.timing in (False, True):
                await _load(engine, size.arrivals, size.arrival_lengths, shape.vocab)
    for kind, found in sorted(device.launches.items(), key=lambda each: -len(each[1].own)):
        _report(report, kind, found)


def _report(report: PartReport, kind: str, found: _Launches) -> None:
    own, passed = found.own[_FIRST:], found.passed[_FIRST:]
    if not own:
        return
    report.row(
        step=kind,
        launches=len(own),
        replayed=found.replays / len(found.own),
        own_ms=1e3 * statistics.median(own),
        own_p95_ms=1e3 * _p95(own),
        passed_ms=1e3 * statistics.median(passed),
    )


def _p95(values: Sequence[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1))]


async def _load(engine: Engine, arrivals: int, lengths: tuple[int, int], vocab: int) -> None:
    """Requests that arrive while others decode: the next one comes with the first token of the one before."""
    rng = random.Random(7)
    longest = 4 * arrivals

    async def read(prompt: list[int], arrived: asyncio.Event) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=longest, ignore_eos=True)
        async with engine.generate(prompt, params) as chunks:
            async for _ in chunks:
                arrived.set()

    async with asyncio.TaskGroup() as group:
        for _ in range(arrivals):
            arrived = asyncio.Event()
            prompt = [rng.randrange(vocab) for _ in range(rng.randint(*lengths))]
            group.create_task(read(prompt, arrived))
            await arrived.wait()
    engine.flush_cache()
