"""``python -m bench overlap``: what launching steps ahead of the one being read hides.

Engines with ``overlap_steps`` 0, 1 and 2 take the same load in turns, each with a reader for every stream;
``over`` is the speed over that with 0, ``busy`` the share of the time in which the device computes. On a
model, the last way has a grammar on every row.

With ``--toy``, a step takes the device as long as it takes the host, and no processor: one overlapped step
then hides the one behind the other, and the best that can be is twice the speed. With ``--stall`` the event
loop stands still for 50 ms now and then: milliseconds that the device is idle each time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.params import Grammar, SamplingParams
from bench.gpu.roofline import Shape
from bench.gpu.shapes import write_model
from bench.null_device import NullDevice, null_engine
from bench.report import Report

OverlapSteps = Literal[0, 1, 2]
OVERLAPS: tuple[OverlapSteps, ...] = (0, 1, 2)
#: does not end within the tokens that are asked for
_GRAMMAR = Grammar("regex", "[a-z ]{4000}")
_PROMPT = 32
_STALL = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-chat", help="a model, or random:LAYERSxHIDDEN in bf16")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--toy", action="store_true", help="a device as fast as the host")
    parser.add_argument("--stall", action="store_true", help="what a loop that stands still costs the device")


def run(options: argparse.Namespace, report: Report) -> None:
    """A row per batch and way, or per step time and way with ``--stall``."""
    import uvloop

    with tempfile.TemporaryDirectory() as folder:
        work = (_stalls if options.stall else _toy if options.toy else _model)(options, Path(folder), report)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(work)


async def _model(options: argparse.Namespace, folder: Path, report: Report) -> None:
    path, load = options.model, "auto"
    if path.startswith("random:"):
        layers, hidden = map(int, path.removeprefix("random:").split("x"))
        shape = Shape("random", layers, hidden, hidden // 64, hidden // 128, 64, 3 * hidden, 864, True)
        path, load = str(write_model(shape, folder)), "random"
    for batch in options.batch:
        async with AsyncExitStack() as stack:
            ways: list[tuple[str, Engine, bool]] = []
            for steps in OVERLAPS:
                config = EngineConfig(
                    model=path,
                    load_format="random" if load == "random" else "auto",
                    device="cpu",
                    threads=options.threads,
                    overlap_steps=steps,
                    max_running_requests=batch,
                    prefix_cache=False,
                    speculation="off",
                )
                engine = await stack.enter_async_context(Engine(config))
                ways.append((str(steps), engine, False))
            if ways[1][1].tokenizer is not None:
                ways.append(("1, grammar", ways[1][1], True))
            rates: list[list[float]] = [[] for _ in ways]
            busy: list[list[float]] = [[] for _ in ways]
            for number in range(options.rounds + 1):
                order = list(enumerate(ways))
                for at, (_, engine, grammar) in order if number % 2 else order[::-1]:
                    before = engine.timeline.overlap()
                    seconds = await _stream_all(engine, batch, options.output, grammar=grammar)
                    after = engine.timeline.overlap()
                    if number:  # the first round warms up
                        rates[at].append(batch * options.output / seconds)
                        computing, idle = after.busy - before.busy, after.gap - before.gap
                        busy[at].append(computing / (computing + idle) if computing else 0.0)
        for (name, _, _), mine, shares in zip(ways, rates, busy, strict=True):
            report.row(
                batch=batch,
                overlap_steps=name,
                tokens_per_s=statistics.median(mine),
                over=statistics.median(a / b for a, b in zip(mine, rates[0], strict=True)),
                busy=statistics.median(shares),
            )


async def _stream_all(engine: Engine, batch: int, output: int, *, grammar: bool = False) -> float:
    """Seconds from the first request to the last token, with a reader for every stream."""
    params = SamplingParams(
        temperature=0, max_tokens=output, ignore_eos=not grammar, grammar=_GRAMMAR if grammar else None
    )

    async def read(number: int) -> int:
        prompt = [100 + (7 * number + at) % 700 for at in range(_PROMPT)]
        async with engine.generate(prompt, params) as stream:
            return sum([len(chunk.token_ids) async for chunk in stream])

    start = time.perf_counter()
    counts = await asyncio.gather(*[read(number) for number in range(batch)])
    seconds = time.perf_counter() - start
    assert set(counts) == {output}, counts
    return seconds


async def _toy(options: argparse.Namespace, folder: Path, report: Report) -> None:
    for batch in options.batch:
        async with AsyncExitStack() as stack:
            engines = [await _null(stack, batch, steps) for steps in OVERLAPS]
            rounds, hosts = [], []
            for number in range(options.rounds + 1):
                # Anew in every round: disturbances last longer than one.
                host = await _host(*engines[0], batch, options.output)
                for _, device in engines:
                    device.seconds = host
                times = [await _step_time(engine, batch, options.output) for engine, _ in engines]
                if number:  # the first round warms up
                    hosts.append(host)
                    rounds.append(times)
        for at, steps in enumerate(OVERLAPS):
            report.row(
                batch=batch,
                overlap_steps=steps,
                host_us=1e6 * statistics.median(hosts),
                step_us=1e6 * statistics.median(each[at] for each in rounds),
                over=statistics.median(each[0] / each[at] for each in rounds),
            )


async def _null(stack: AsyncExitStack, batch: int, steps: OverlapSteps) -> tuple[Engine, NullDevice]:
    engine, device = null_engine(batch, 0.0, overlap_steps=steps, speculation="off")
    return await stack.enter_async_context(engine), device


async def _step_time(engine: Engine, batch: int, output: int) -> float:
    """Seconds per step of a load."""
    steps = engine.stats().steps
    return await _stream_all(engine, batch, output) / (engine.stats().steps - steps)


async def _host(engine: Engine, device: NullDevice, batch: int, output: int) -> float:
    """Seconds that the host needs for a step beside a device that takes as long: planning, resolving,
    delivering, reading."""
    device.seconds = 0.0
    for _ in range(2):
        before = device.seconds
        device.seconds = max(0.0, await _step_time(engine, batch, output) - before)
    return device.seconds


async def _stalls(options: argparse.Namespace, folder: Path, report: Report) -> None:
    for milliseconds in (10, 20, 30):
        for steps in OVERLAPS[1:]:
            async with AsyncExitStack() as stack:
                engine, device = await _null(stack, 8, steps)
                device.seconds = milliseconds / 1e3
                reading = asyncio.ensure_future(_stream_all(engine, 8, 40 * options.rounds))
                idle = [await _stall(device) for _ in range(2 * options.rounds)]
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
            report.row(
                step_ms=milliseconds,
                overlap_steps=steps,
                idle_ms=1e3 * statistics.median(idle),
                expected_ms=max(0.0, 1e3 * _STALL - steps * milliseconds),
            )


async def _stall(device: NullDevice) -> float:
    """Let some steps pass, stall the loop, let some more pass: seconds that the device was idle."""
    await asyncio.sleep(6 * device.seconds)
    gap = device.lane.gap
    time.sleep(_STALL)  # noqa: ASYNC251 - this is the stall
    await asyncio.sleep(4 * device.seconds)
    return device.lane.gap - gap
