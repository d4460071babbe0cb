"""``python -m bench twin``: what the twin predicts, beside what this machine then measures.

Costs of ``--model`` are calibrated (or read from ``--costs``), and seeded loads are played to the engine
and to its twin, with calibrations of ``--slice`` seconds in between, as machines drift: ``low``, ``70``
and ``95`` per cent of the capacity that the twin has, a ``burst``, and ``long`` prompts. ``error`` is the
relative error of the mean of some runs of the twin against that of both real ones, and ``spread`` the
difference of these; a bound holds for the figure or for 1.5 spreads. ``replay`` plays the times of recorded
steps to the scheduler and compares compositions. ``ranking`` orders configurations by latency.
``replicas`` plays a load to two engines in processes of one thread each, one of which is killed half-way;
its costs should come from two calibrations with ``--threads 1`` at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.launcher import StepHandle
from aioinfer.loop.pacing import Pace
from aioinfer.parallel import Dispatcher
from aioinfer.scheduling.costs import Costs, HostCosts, Sizes
from aioinfer.scheduling.step import Step
from aioinfer.testing.virtual_time import VirtualLoop
from aioinfer.twin.calibration import calibrate, fitted, measured
from aioinfer.twin.device import TwinDevice, TwinLauncher
from aioinfer.twin.load import Session, single
from aioinfer.twin.outcome import Outcome
from aioinfer.twin.playing import Player
from aioinfer.twin.recording import RecordedStep, Recording, members
from aioinfer.twin.running import Event, Setup, Twin, simulate
from bench.report import Report

#: requests that generate, and those of prefill with the lengths of their chunks
Composition: TypeAlias = tuple[tuple[int, ...], tuple[tuple[int, int], ...]]
#: bounds of the relative errors
BOUNDS = {"tokens_per_s": 0.03, "itl_p50": 0.05, "ttft_p50": 0.10, "ttft_p95": 0.15}
#: of these loads only the throughput is judged: they are beyond 80 % of the capacity
SATURATED = ("95", "burst")
#: runs of the twin whose mean is its prediction
SEEDS = 5
#: of the capacity of one engine
SHARES = {"low": 0.3, "70": 0.7, "95": 0.95, "ranking": 0.85, "two": 1.2, "four": 2.4}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "4 at a time": {"max_running_requests": 4},
    "16 at a time": {"max_running_requests": 16},
    "chunks of 32": {"chunk_size": 32, "itl_target": 0.0},
    "whole prompts": {"step_priority": "prefill", "mixed": False, "itl_target": 0.0},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="tiny-chat")
    parser.add_argument("--random", action="store_true", help="random weights: config.json suffices")
    parser.add_argument("--costs", type=Path, help="file of aioinfer calibrate")
    parser.add_argument("--calibrate", type=float, default=120.0, help="seconds of calibration without one")
    parser.add_argument("--slice", type=float, default=12.0, help="seconds of those between runs; 0: none")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each load")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", nargs="*", default=["low", "70", "95", "burst", "long", "replay", "ranking"]
    )


def run(options: argparse.Namespace, report: Report) -> None:
    load_format: Any = "random" if options.random else "auto"
    config = EngineConfig(model=options.model, load_format=load_format, speculation="off", prefix_cache=False)
    if options.costs is None:
        costs = asyncio.run(calibrate(config, seconds=options.calibrate))
    else:
        costs = Costs.read(options.costs)
    report.row(part="costs", what=costs.description)
    loads = Loads(costs, options.seconds, options.seed)
    report.row(part="capacity", what=f"{loads.capacity:.3g} requests/s")
    for name in ("low", "70", "95", "burst", "long"):
        if name in options.only:
            compare(config, costs, name, [*loads.make(name)], options, report)
    if "replay" in options.only:
        replay(config, costs, [*loads.make("70")], report)
    if "replicas" in options.only:
        for killed in (False, True):
            replicas(config, costs, [*loads.make("two")], options, report, killed=killed)
    if "timed" in options.only:
        timed(costs, [*loads.make("four")], options, report)
    if "ranking" in options.only:
        rank(config, costs, [*loads.make("ranking")], report)


class Loads:
    """Held-out loads, in shares of what the twin says that the engine can do."""

    def __init__(self, costs: Costs, seconds: float, seed: int) -> None:
        self._seconds, self._seed = seconds, seed
        self._longest = min(3000, costs.engine["max_model_len"] - 200)
        burst = [dataclasses.replace(each, at=0.0) for each in self._requests(200, 1.0, 160.0)]
        self.capacity = 200 / simulate(burst, Setup(costs=costs)).seconds
        long = [dataclasses.replace(each, at=0.0) for each in self._requests(100, 1.0, self._longest / 2)]
        self.long_capacity = 100 / simulate(long, Setup(costs=costs)).seconds

    def make(self, name: str) -> Iterator[Session]:
        if name == "burst":
            count = max(10, int(self._seconds / 2 * self.capacity))
            return (dataclasses.replace(each, at=0.0) for each in self._requests(count, 1.0, 160.0))
        if name == "long":
            rate = 0.6 * self.long_capacity
            return self._requests(int(self._seconds * rate), rate, self._longest / 2)
        rate = (
            self.capacity
            * {"low": 0.3, "70": 0.7, "95": 0.95, "ranking": 0.85, "two": 1.2, "four": 2.4}[name]
        )
        return self._requests(int(self._seconds * rate), rate, 160.0)

    def _requests(self, count: int, rate: float, prompt: float) -> Iterator[Session]:
        rng, at = random.Random(self._seed), 0.0
        for number in range(count):
            at += rng.expovariate(rate)
            length = int(min(self._longest, max(4.0, rng.lognormvariate(np.log(prompt), 0.7))))
            yield single(at, ((number + 1, length),), int(min(150, max(2.0, rng.lognormvariate(3.6, 0.6)))))


def compare(
    config: EngineConfig, costs: Costs, name: str, load: Sequence[Session], options: Any, report: Report
) -> None:
    """A row per figure: real, twin, error, spread."""
    slices: list[tuple[list[RecordedStep], list[tuple[float, float]], Engine]] = []
    outcomes: list[Outcome] = []
    for run in range(options.runs + 1):
        if options.slice:
            slices.append(asyncio.run(measured(config, options.slice, run)))
        if run < options.runs:
            outcomes.append(asyncio.run(play(config, load))[0])
    if slices:
        steps = [step for part, *_ in slices for step in part]
        arrivals = [each for _, part, _ in slices for each in part]
        costs = fitted(config, steps, arrivals, slices[0][2])
    judge(name, predict(load, Setup(costs=costs, config=config)), outcomes, report)


def predict(load: Sequence[Session], setup: Setup) -> list[Outcome]:
    """Of several seeds: with few and long steps, the noise of one run moves its sums by some per cent."""
    return [simulate(load, dataclasses.replace(setup, seed=seed)) for seed in range(SEEDS)]


def judge(name: str, twins: Sequence[Outcome], outcomes: Sequence[Outcome], report: Report) -> None:
    predicted, measured = ([figures(each) for each in runs] for runs in (twins, outcomes))
    for what, bound in BOUNDS.items():
        values = [each[what] for each in measured]
        real, twin = float(np.mean(values)), float(np.mean([each[what] for each in predicted]))
        error, spread = twin / real - 1, (max(values) - min(values)) / real
        judged = what == "tokens_per_s" or name not in SATURATED
        report.row(
            part=name, what=what, real=real, twin=twin, error=error, spread=spread, bound=bound,
            holds=str(abs(error) <= max(bound, 1.5 * spread)) if judged else "-", requests=len(twins[0]),
        )  # fmt: skip


def figures(outcome: Outcome) -> dict[str, float]:
    """Tokens per second, and times in milliseconds."""
    ttft = 1e3 * (np.asarray(outcome.first) - np.asarray(outcome.arrived))
    latency = 1e3 * (np.asarray(outcome.ended) - np.asarray(outcome.arrived))
    begun = min(outcome.arrived)
    return {
        "tokens_per_s": sum(outcome.output_tokens) / (max(outcome.ended) - begun),
        "itl_p50": 1e3 * outcome.itl.quantile(0.5),
        "ttft_p50": float(np.quantile(ttft, 0.5)),
        "ttft_p95": float(np.quantile(ttft, 0.95)),
        "ttft_mean": float(ttft.mean()),
        "latency_mean": float(latency.mean()),
    }


async def play(
    config: EngineConfig, load: Sequence[Session], *, warm: bool = True
) -> tuple[Outcome, list[RecordedStep], float]:
    """A load on the engine: what came of it, its steps, and when it began. ``warm``: not its first one."""
    async with Engine(config) as engine:
        if warm:
            # Memory that is touched first is slow on some machines: as many pages as the load will have.
            await Player(engine).play([single(0.0, (((1 << 20) + each, 600),), 60) for each in range(64)])
        recording = Recording(engine)
        player = Player(engine)
        outcome = await player.play(load)
        return outcome, recording.stop(), player._zero


# -- replay --------------------------------------------------------------------------------------------


def replay(config: EngineConfig, costs: Costs, load: Sequence[Session], report: Report) -> None:
    """The scheduler with recorded times: steps whose composition is another one."""
    # From its first step on: what chunks may have follows from all that it has seen.
    outcome, steps, zero = asyncio.run(play(config, load, warm=False))
    order = np.argsort(np.asarray(outcome.arrived), kind="stable")
    arrived = np.asarray(outcome.arrived)[order]
    # Requests end in another order than they come in: their lengths say which is which.
    sessions = [dataclasses.replace(each, at=float(at)) for each, at in zip(load, arrived, strict=True)]
    twin = Replay(Setup(costs=costs, config=config, exact=True), steps, zero)
    with contextlib.closing(VirtualLoop(0)) as loop:
        loop.run_until_complete(twin.play(sessions))
    keys = [key for each in steps for key in (*each.generating, *(key for key, _ in each.prefilling))]
    real = [relative((each.generating, each.prefilling), min(keys) - 1) for each in steps]
    same = sum(mine == theirs for mine, theirs in zip(twin.found, real, strict=False))
    share = same / max(len(twin.found), len(real))
    report.row(
        part="replay", what="steps of another composition", real=len(real), twin=len(twin.found),
        error=1 - share, bound=0.01, holds=str(share >= 0.99), requests=len(load),
    )  # fmt: skip


def relative(step: Composition, least: int) -> Composition:
    """A composition with requests counted from the first one of the recording."""
    generating, prefilling = step
    return tuple(key - least for key in generating), tuple(
        (key - least, length) for key, length in prefilling
    )


class Replay(Twin):
    """A twin whose steps are read when those of a recording were."""

    def __init__(self, setup: Setup, steps: Sequence[RecordedStep], zero: float) -> None:
        super().__init__(setup)
        self.steps, self.zero = steps, zero
        self.found: list[Composition] = []

    def launcher(self, device: TwinDevice, number: int) -> TwinLauncher:
        return ReplayLauncher(self, device)

    def engine(self) -> Any:
        made = super().engine()
        made.costs = None  # it learns them, as the other one did
        return made

    def at(self, moment: float) -> float:
        """A recorded moment on the clock of the loop."""
        return moment - self.zero + self._zero


class ReplayPace(Pace):
    """Plans a step when it was planned."""

    __slots__ = ("_twin",)

    def __init__(self, twin: Replay) -> None:
        super().__init__()
        self._twin = twin

    def spare(self, step: Step, launched: float, now: float) -> float:
        twin, number = self._twin, len(self._twin.found)
        if number >= len(twin.steps):
            return 0.0
        return max(0.0, twin.at(twin.steps[number].planned) - now)


class ReplayHandle(StepHandle):
    """Launched when it was."""

    __slots__ = ("real",)

    @property
    def launched_at(self) -> float:
        return self.real

    @launched_at.setter
    def launched_at(self, now: float) -> None:
        self.real = getattr(self, "real", now)


class ReplayLauncher(TwinLauncher):
    """Its host takes no time of its own: that is in the recorded moments."""

    def __init__(self, twin: Replay, device: TwinDevice) -> None:
        super().__init__(device, twin.setup.costs)
        self._twin = twin

    def launch(self, step: Step, landed: Callable[[], None]) -> StepHandle:
        twin, handle = self._twin, ReplayHandle(step, landed)
        number, now = len(twin.found), self._loop.time()
        twin.found.append(members(step))
        if number < len(twin.steps):
            real = twin.steps[number]
            end, read, handle.real = (twin.at(each) for each in (real.ended, real.read, real.launched))
        else:
            end = read = now + self._step.seconds(Sizes.of(step))
        if self.runtime is not None and not number:
            self.runtime.driver._pace = ReplayPace(twin)
        self.flights.append((handle, end, self._loop.call_at(max(now, read), self._land)))
        return handle


# -- replicas ------------------------------------------------------------------------------------------


def replicas(
    config: EngineConfig, costs: Costs, load: Sequence[Session], options: Any, report: Report, *, killed: bool
) -> None:
    """Two engines behind a dispatcher; of the second one, perhaps, nothing is left half-way."""
    half = load[len(load) // 2].at
    events = (Event(half, "kill", 1),) if killed else ()
    setup = Setup(costs=costs, config=config, replicas=2, routing="total_tokens", events=events)
    predicted = predict(load, setup)
    measured = [asyncio.run(dispatched(config, load, half if killed else None)) for _ in range(options.runs)]
    judge("one of two killed" if killed else "two replicas", predicted, measured, report)


async def dispatched(config: EngineConfig, load: Sequence[Session], kill: float | None) -> Outcome:
    config = dataclasses.replace(config, threads=1)
    async with Dispatcher(config=config, processes=2, policy="total_tokens") as dispatcher:
        await Player(dispatcher).play([single(0.0, (((1 << 20) + each, 600),), 60) for each in range(99)])
        loop = asyncio.get_running_loop()
        if kill is not None:
            dispatcher._started().when_lost = None  # it is not started again
            victim: Any = dispatcher._replicas[1]
            loop.call_later(kill, os.kill, victim.pid, signal.SIGKILL)
        return await Player(dispatcher).play(load)


def timed(costs: Costs, load: Sequence[Session], options: Any, report: Report) -> None:
    """Four engines on a loop in real time, whose devices take their time and no processor; one is lost. The
    host is the real one."""
    half = load[len(load) // 2].at
    config = EngineConfig(prefix_cache=False)
    setup = Setup(
        costs=costs,
        config=config,
        replicas=4,
        routing="total_tokens",
        events=(Event(half, "kill", 1),),
        exact=True,
    )
    hostless = dataclasses.replace(setup, costs=msgspec.structs.replace(costs, host=HostCosts()))
    real = [asyncio.run(Twin(hostless).play(load)) for _ in range(options.runs)]
    judge("one of four lost", [simulate(load, setup)], real, report)


# -- ranking -------------------------------------------------------------------------------------------


def rank(config: EngineConfig, costs: Costs, load: Sequence[Session], report: Report) -> None:
    """A row per configuration, and how far both orders agree: Kendall's tau."""
    latencies: list[tuple[float, float]] = []
    for name, settings in CONFIGURATIONS.items():
        changed = dataclasses.replace(config, **settings)
        real = figures(asyncio.run(play(changed, load))[0])["latency_mean"]
        twin = figures(simulate(load, Setup(costs=costs, config=changed)))["latency_mean"]
        latencies.append((real, twin))
        report.row(part="ranking", what=name, real=real, twin=twin, error=twin / real - 1)
    pairs = [*itertools.combinations(latencies, 2)]
    agree = sum((a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in pairs)
    tau = (2 * agree - len(pairs)) / len(pairs)
    report.row(part="ranking", what="Kendall's tau", twin=tau, bound=0.8, holds=str(tau >= 0.8))
