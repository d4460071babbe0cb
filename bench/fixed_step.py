"""Engines on a device whose steps take a fixed time: what a window hides, and what a stalled loop costs."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.device import DeviceInfo, Landed, StepResult
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.observe.timeline import DeviceLane, now
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step

__all__ = ["bench_stall", "bench_toy"]

WINDOWS = (0, 1, 2)


class FixedStepDevice:
    """Every step takes ``seconds``; meanwhile other threads run. Its tokens mean nothing.

    Short steps are spent hashing, which releases the GIL: sleeping is not exact enough for those.
    """

    synchronous = True

    def __init__(self) -> None:
        self.lane = DeviceLane()
        self.seconds = 0.0
        self._per_second = _hashes_per_second()

    def open(self, progress: Any = None) -> DeviceInfo:
        return DeviceInfo(1000, 4096, 100_000, frozenset(), "takes its time")

    def prepare(self, step: Step) -> Step:
        return step

    def launch(self, step: Step) -> Landed:
        start = now()
        if self.seconds > 0.005:
            time.sleep(self.seconds)
        elif self.seconds:
            hashlib.pbkdf2_hmac("sha256", b"a step", b"", max(1, int(self.seconds * self._per_second)))
        self.lane.step(step.id, start, start, start, now())
        return Landed(StepResult([5] * step.num_rows))

    def check(self) -> None:
        """Never lost."""

    def close(self) -> None:
        """Nothing to give back."""


def _hashes_per_second() -> float:
    def once() -> float:
        start = time.perf_counter()
        hashlib.pbkdf2_hmac("sha256", b"a step", b"", 2000)
        return time.perf_counter() - start

    return 2000 / statistics.median(once() for _ in range(50))


async def _engine(stack: AsyncExitStack, batch: int, window: int) -> tuple[Engine, FixedStepDevice]:
    config = EngineConfig(model="toy", window=window, max_running_requests=batch, max_step_tokens=8 * batch)  # type: ignore[arg-type]
    device = FixedStepDevice()
    engine = Engine(config, launcher=lambda _: ThreadLauncher(device), tokenizer=lambda _: None)
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
    """A device as fast as the host: one behind the other takes twice as long as one beside the other."""
    lines = []
    names = "".join(f"{f'window {window}':>10s}" for window in WINDOWS)
    print(f"{'batch':>6s}{'host us':>9s}{names}{'1 over 0':>10s}{'2 over 0':>10s}")
    for batch in options.batch:
        async with AsyncExitStack() as stack:
            engines = [await _engine(stack, batch, window) for window in WINDOWS]
            await _run(engines[0][0], batch, options.output)
            # Of a step with nothing to hide behind: planning, handing over, resolving, delivering.
            host = statistics.median(
                [await _run(engines[0][0], batch, options.output) for _ in range(options.rounds)]
            )
            for _, device in engines:
                device.seconds = host
            rounds = [
                [await _run(engine, batch, options.output) for engine, _ in engines]
                for _ in range(options.rounds)
            ]
            times = [statistics.median(column) for column in zip(*rounds, strict=True)]
            gains = [statistics.median(each[0] / each[window] for each in rounds) for window in WINDOWS]
        lines.append(
            {
                "batch": batch,
                "host_us": 1e6 * host,
                **{f"window_{window}_us": 1e6 * times[window] for window in WINDOWS},
                "gain_1": gains[1],
                "gain_2": gains[2],
            }
        )
        print(
            f"{batch:6d}{1e6 * host:9.0f}"
            + "".join(f"{1e6 * seconds:10.0f}" for seconds in times)
            + f"{gains[1]:9.2f}x{gains[2]:9.2f}x"
        )
    return lines


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
