"""Engines on a device whose steps take a fixed time: what a window hides, and what a stalled loop costs."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import statistics
import sys
import time
from contextlib import AsyncExitStack
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import CompletedFlight, DeviceInfo, StepResult
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step

__all__ = ["bench_stall", "bench_toy"]

WINDOWS = (0, 1, 2)


class FixedStepDevice:
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
    stack: AsyncExitStack, batch: int, window: int, mode: str = "thread"
) -> tuple[Engine, FixedStepDevice]:
    config = EngineConfig(
        model="toy", overlap_steps=window, max_running_requests=batch, max_step_tokens=8 * batch
    )  # type: ignore[arg-type]
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


async def bench_toy(options: argparse.Namespace) -> list[dict[str, float]]:
    """A device as fast as the host: one after the other (inline) takes twice as long as one beside the other.

    A window of 0 with a launch thread is in between: consumers run while the device computes.
    """
    lines = []
    ways = {"inline": (0, "inline"), **{f"window {window}": (window, "thread") for window in WINDOWS}}
    print(
        f"{'batch':>6s}{'host us':>9s}{'device us':>11s}"
        + "".join(f"{name:>10s}" for name in ways)
        + "   gains"
    )
    for batch in options.batch:
        async with AsyncExitStack() as stack:
            engines = [await _engine(stack, batch, *way) for way in ways.values()]
            for engine, _ in engines:
                await _run(engine, batch, options.output)
            rounds, hosts = [], []
            for _ in range(options.rounds):
                # Anew in every round: the machine's moods last longer than one, and a host whose device
                # takes its time is slower than one that never waits.
                host = await _host(*engines[0], batch, options.output)
                for _, device in engines:
                    device.seconds = host
                hosts.append(host)
                rounds.append([await _run(engine, batch, options.output) for engine, _ in engines])
            host = statistics.median(hosts)
            device_us = 1e6 * engines[2][1].lane.busy / engines[2][1].lane.steps
        times = dict(zip(ways, map(statistics.median, zip(*rounds, strict=True)), strict=True))
        gains = {
            name: statistics.median(each[0] / each[at] for each in rounds) for at, name in enumerate(ways)
        }
        lines.append(
            {
                "batch": batch,
                "host_us": 1e6 * host,
                "device_us": device_us,
                **{f"{name}_us": 1e6 * seconds for name, seconds in times.items()},
                **{f"{name}_gain": gain for name, gain in gains.items()},
            }
        )
        print(
            f"{batch:6d}{1e6 * host:9.0f}{device_us:11.0f}"
            + "".join(f"{1e6 * seconds:10.0f}" for seconds in times.values())
            + "  "
            + "".join(f"{gain:6.2f}x" for gain in gains.values())
        )
    return lines


async def _host(engine: Engine, device: FixedStepDevice, batch: int, output: int) -> float:
    """Seconds that the host needs for a step: planning, resolving, delivering, reading."""
    device.seconds = 0.0
    for _ in range(2):
        busy, steps = device.lane.busy, device.lane.steps
        seconds = await _run(engine, batch, output)
        seconds -= (device.lane.busy - busy) / (device.lane.steps - steps)
        device.seconds = seconds
    return seconds


async def bench_stall(options: argparse.Namespace, stall: float = 0.05) -> list[dict[str, float]]:
    """The loop stands still for 50 ms, again and again: how long is the device idle each time?"""
    lines = []
    print(f"{'step ms':>8s}{'window':>8s}{'idle ms a stall':>17s}{'worst':>8s}{'stall - steps ahead':>21s}")
    for milliseconds in (10, 20, 30):
        for window in WINDOWS:
            async with AsyncExitStack() as stack:
                engine, device = await _engine(stack, 8, window)
                device.seconds = milliseconds / 1e3
                reading = asyncio.ensure_future(_run(engine, 8, 40 * options.rounds))
                idle = [await _stall(device, stall) for _ in range(2 * options.rounds)]
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            line = {
                "step_ms": milliseconds,
                "window": window,
                "idle_ms": 1e3 * statistics.median(idle),
                "worst_ms": 1e3 * max(idle),
                "expected_ms": max(0.0, 1e3 * stall - window * milliseconds),
            }
            lines.append(line)
            print(
                f"{milliseconds:8d}{window:8d}{line['idle_ms']:17.1f}{line['worst_ms']:8.1f}"
                f"{line['expected_ms']:21.1f}"
            )
    return lines


async def _stall(device: FixedStepDevice, stall: float) -> float:
    """Let some steps pass, stall the loop, let some more pass: seconds that the device was idle."""
    await asyncio.sleep(6 * device.seconds)
    gap = device.lane.gap
    time.sleep(stall)  # noqa: ASYNC251 - this is the stall
    await asyncio.sleep(4 * device.seconds)
    return device.lane.gap - gap
