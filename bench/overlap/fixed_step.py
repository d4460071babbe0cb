"""Engines on a device whose steps take a fixed time: what overlap hides, and what a stalled loop costs."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import statistics
import sys
import time
from contextlib import AsyncExitStack
from typing import Any, Literal

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import CompletedFlight, DeviceInfo, NoAdapters, StepResult
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step
from bench.report import Report

__all__ = ["OverlapSteps", "bench_stall", "bench_toy"]

OverlapSteps = Literal[0, 1, 2]
OVERLAPS: tuple[OverlapSteps, ...] = (0, 1, 2)


class FixedStepDevice(NoAdapters):
    """Every step takes ``seconds`` and no processor, as one on a GPU does. Its tokens mean nothing."""

    synchronous = True

    def __init__(self) -> None:
        self.lane = DeviceLane()
        self.seconds = 0.0
        self._oversleep: float | None = None

    def open(self, progress: Any = None) -> DeviceInfo:
        return DeviceInfo(1000, 4096, 100_000, frozenset(), "takes its time")

    def prepare(self, step: Step) -> Step:
        return step

    def launch(self, step: Step) -> CompletedFlight:
        if self._oversleep is None:
            self._oversleep = _oversleep()
        start = now()
        if self.seconds:
            time.sleep(max(0.0, self.seconds - self._oversleep))
        self.lane.step(step.id, start, start, start, now())
        return CompletedFlight(StepResult([5] * step.num_rows))

    def check(self) -> None:
        """Never lost."""

    def close(self) -> None:
        """Nothing to give back."""


def _oversleep() -> float:
    """By how much sleeping takes longer than it should, on this thread; made as small as can be."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # PR_SET_TIMERSLACK: one nanosecond

    def once() -> float:
        start = time.perf_counter()
        time.sleep(2e-4)
        return time.perf_counter() - start - 2e-4

    return statistics.median(once() for _ in range(100))


async def _engine(
    stack: AsyncExitStack, batch: int, steps: OverlapSteps, mode: str = "thread"
) -> tuple[Engine, FixedStepDevice]:
    config = EngineConfig(
        model="toy", overlap_steps=steps, max_running_requests=batch, max_step_tokens=8 * batch
    )
    device = FixedStepDevice()
    launcher = ThreadLauncher if mode == "thread" else InlineLauncher
    engine = Engine(config, launcher=lambda _: launcher(device), tokenizer=lambda _: None)
    return await stack.enter_async_context(engine), device


async def _run(engine: Engine, batch: int, output: int) -> float:
    """Seconds per step."""

    async def read() -> None:
        async with engine.generate([5] * 8, SamplingParams(max_tokens=output)) as stream:
            async for _ in stream:
                pass

    steps, start = engine.stats().steps, time.perf_counter()
    await asyncio.gather(*[read() for _ in range(batch)])
    return (time.perf_counter() - start) / (engine.stats().steps - steps)


async def bench_toy(options: argparse.Namespace, report: Report) -> None:
    """A device as fast as the host: one after the other (inline) takes twice as long as one beside the other.

    With a launch thread and no overlap it is in between: consumers run while the device computes.
    """
    ways: dict[str, tuple[OverlapSteps, str]] = {"inline": (0, "inline")}
    ways |= {f"overlap {steps}": (steps, "thread") for steps in OVERLAPS}
    for batch in options.batch:
        async with AsyncExitStack() as stack:
            engines = [await _engine(stack, batch, *way) for way in ways.values()]
            for engine, _ in engines:
                await _run(engine, batch, options.output)
            rounds, hosts = [], []
            for _ in range(options.rounds):
                # Anew in every round: disturbances last longer than one, and a host whose device takes its
                # time is slower than one that never waits.
                host = await _host(*engines[0], batch, options.output)
                for _, device in engines:
                    device.seconds = host
                hosts.append(host)
                rounds.append([await _run(engine, batch, options.output) for engine, _ in engines])
            device_us = 1e6 * engines[2][1].lane.busy / engines[2][1].lane.steps
        times = dict(zip(ways, map(statistics.median, zip(*rounds, strict=True)), strict=True))
        gains = {
            name: statistics.median(each[0] / each[at] for each in rounds) for at, name in enumerate(ways)
        }
        report.row(
            batch=batch,
            host_us=1e6 * statistics.median(hosts),
            device_us=device_us,
            **{f"{name} us": 1e6 * seconds for name, seconds in times.items()},
            **{f"{name} gain": gain for name, gain in gains.items()},
        )


async def _host(engine: Engine, device: FixedStepDevice, batch: int, output: int) -> float:
    """Seconds that the host needs for a step: planning, resolving, delivering, reading."""
    device.seconds = 0.0
    for _ in range(2):
        busy, steps = device.lane.busy, device.lane.steps
        seconds = await _run(engine, batch, output)
        seconds -= (device.lane.busy - busy) / (device.lane.steps - steps)
        device.seconds = seconds
    return seconds


async def bench_stall(options: argparse.Namespace, report: Report, stall: float = 0.05) -> None:
    """The loop stands still for ``stall`` seconds, again and again: how long is the device idle each time?

    ``expected_ms`` is the stall less the steps that were launched ahead.
    """
    for milliseconds in (10, 20, 30):
        for steps in OVERLAPS:
            async with AsyncExitStack() as stack:
                engine, device = await _engine(stack, 8, steps)
                device.seconds = milliseconds / 1e3
                reading = asyncio.ensure_future(_run(engine, 8, 40 * options.rounds))
                idle = [await _stall(device, stall) for _ in range(2 * options.rounds)]
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            report.row(
                step_ms=milliseconds,
                overlap_steps=steps,
                idle_ms=1e3 * statistics.median(idle),
                worst_ms=1e3 * max(idle),
                expected_ms=max(0.0, 1e3 * stall - steps * milliseconds),
            )


async def _stall(device: FixedStepDevice, stall: float) -> float:
    """Let some steps pass, stall the loop, let some more pass: seconds that the device was idle."""
    await asyncio.sleep(6 * device.seconds)
    gap = device.lane.gap
    time.sleep(stall)  # noqa: ASYNC251 - this is the stall
    await asyncio.sleep(4 * device.seconds)
    return device.lane.gap - gap
