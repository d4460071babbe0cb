"""``python -m bench deadlines``: the share of deadlines that each policy meets on a mixed load.

Requests of mixed prompts and outputs arrive at random, most with a deadline from tight to loose, some with
none. The rate is a multiple of what the engine computes when all arrive at once. Deadlines are shares of the
time of that run, longer for longer outputs. It runs with a cost model in ``virtual`` time, with the same on a
``timed`` loop, which waits for each step, and for ``real`` on a model.

``fcfs`` and ``lpm`` know no deadlines; with ``priority``, nearer ones are more important; ``edf`` is earliest
deadline first. With ``slack`` the engine refuses what it expects to be late, and with all others nothing,
``slack, all`` included. ``met`` is the share of all requests with a deadline: a refused one counts as missed.
``free_s`` is how long requests without a deadline took. ``estimate`` is the duration that was expected when a
request came, as a multiple of what it was.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import Rejected
from aioinfer.params import SamplingParams
from aioinfer.scheduling.forecast import Forecast, Prediction
from aioinfer.scheduling.policies.fcfs import Fcfs
from aioinfer.scheduling.policies.lpm import Lpm
from aioinfer.scheduling.policies.priority import Priority
from aioinfer.scheduling.policies.slack import Slack
from aioinfer.scheduling.policy import Estimates, Policy, Ranked
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Step
from bench.report import Report, percentiles

PROMPTS = (16, 64, 256)
OUTPUTS = (16, 48, 128)
#: of the time of all requests together
DEADLINES = (None, 0.03, 0.06, 0.12, 0.3)
VOCAB = (100, 800)
CLOCKS = ("virtual", "timed", "real")


class Edf(Ranked):
    """Earliest deadline first."""

    def rank(self, sequence: Sequence) -> float:
        return float("inf") if sequence.deadline is None else sequence.deadline


class Watched(Slack):
    """Keeps what was expected of each request with a deadline, by its id."""

    expected: dict[str | None, float]
    newest: Prediction | None = None

    def plan_with(self, estimates: Estimates) -> None:
        super().plan_with(estimates)
        assert isinstance(estimates, Forecast)
        expect = estimates.expect

        def watched(*arguments: Any) -> Prediction | None:
            self.newest = expect(*arguments)
            return self.newest

        estimates.expect = watched  # type: ignore[method-assign, assignment]

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        if (found := self.newest) is not None and found.end is not None:
            self.expected.setdefault(sequence.request.request_id, found.end)
        self.newest = None


def all_of(cls: type[Policy]) -> type[Policy]:
    """The policy on an engine that refuses nothing."""

    class All(cls):  # type: ignore[misc, valid-type]
        def plan_with(self, estimates: Estimates) -> None:
            super().plan_with(estimates)
            assert isinstance(estimates, Forecast)
            late = estimates.late

            def never(*arguments: Any) -> None:
                late(*arguments)

            estimates.late = never  # type: ignore[method-assign, assignment]

    return All


POLICIES: dict[str, type] = {
    "fcfs": all_of(Fcfs),
    "lpm": all_of(Lpm),
    "priority": all_of(Priority),
    "edf": all_of(Edf),
    "slack, all": all_of(Watched),
    "slack": Watched,
}


class Ask(NamedTuple):
    """A request of the load, with times in multiples of that of all together."""

    number: int
    at: float
    prompt: list[int]
    output: int
    deadline: float | None


@dataclass
class Outcome:
    met: int = 0
    late: int = 0
    refused: int = 0
    free: list[float] = field(default_factory=list)
    estimates: list[float] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[0.8, 1.0, 1.5, 3.0], help="of the capacity"
    )
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--running", type=int, default=16, help="max_running_requests")
    parser.add_argument("--model", default="tiny-chat", help="model of the real runs")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--clocks", nargs="+", choices=CLOCKS, default=list(CLOCKS))


def run(options: argparse.Namespace, report: Report) -> None:
    """All policies under one load after the other, by each clock."""
    import uvloop

    from aioinfer.testing import VirtualLoop

    report.fact("seed", options.seed)
    for clock in options.clocks:
        loop = VirtualLoop if clock == "virtual" else uvloop.new_event_loop
        _rows(options, report, clock, loop, _real(options) if clock == "real" else _simulated(options))


def _rows(
    options: argparse.Namespace,
    report: Report,
    clock: str,
    loop: Callable[[], asyncio.AbstractEventLoop],
    make: Callable[[str | type], Engine],
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        seconds = runner.run(_at_once(make("fcfs"), _load(options, None)))
    for load in options.loads:
        asks = _load(options, load)
        for name in options.policies:
            Watched.expected = {}
            with asyncio.Runner(loop_factory=loop) as runner:
                found = runner.run(_course(make(POLICIES[name]), asks, seconds))
            figures, took = percentiles(found.estimates), percentiles(found.free)
            report.row(
                clock=clock,
                load=load,
                policy=name,
                met=found.met / max(1, found.met + found.late + found.refused),
                late=found.late,
                refused=found.refused,
                free_s_mean=took.get("mean"),
                free_s_max=took.get("max"),
                estimate_p50=figures.get("p50"),
                estimate_p95=figures.get("p95"),
                estimate_off=_off(found.estimates),
            )


def _off(estimates: list[float]) -> float | None:
    """The mean of how far they are off, as a share."""
    return sum(abs(each - 1) for each in estimates) / len(estimates) if estimates else None


def _load(options: argparse.Namespace, load: float | None) -> list[Ask]:
    """The same requests for every load; None: all at once."""
    rng, asks, at = random.Random(options.seed), list[Ask](), 0.0
    for number in range(options.requests):
        length, output, share = rng.choice(PROMPTS), rng.choice(OUTPUTS), rng.choice(DEADLINES)
        deadline = None if share is None else share * (0.4 + output / max(OUTPUTS))
        prompt = [rng.randint(*VOCAB) for _ in range(length)]
        at += rng.expovariate(options.requests)
        asks.append(Ask(number, at / load if load else 0.0, prompt, output, deadline))
    return asks


async def _at_once(engine: Engine, asks: list[Ask]) -> float:
    """Seconds for all of them together."""
    async with engine:
        for _ in range(2):
            begin = asyncio.get_running_loop().time()
            async with asyncio.TaskGroup() as group:
                for ask in asks:
                    group.create_task(_one(engine, ask, None, Outcome()))
    return asyncio.get_running_loop().time() - begin


async def _course(engine: Engine, asks: list[Ask], seconds: float) -> Outcome:
    loop, found = asyncio.get_running_loop(), Outcome()
    async with engine:
        begin = loop.time()
        async with asyncio.TaskGroup() as group:
            for ask in asks:
                await asyncio.sleep(max(0.0, begin + ask.at * seconds - loop.time()))
                deadline = None if ask.deadline is None else ask.deadline * seconds
                group.create_task(_one(engine, ask, deadline, found))
    return found


async def _one(engine: Engine, ask: Ask, deadline: float | None, found: Outcome) -> None:
    loop = asyncio.get_running_loop()
    begin, name = loop.time(), str(ask.number)
    params = SamplingParams(temperature=0, max_tokens=ask.output, ignore_eos=True)
    priority = 0 if deadline is None else int(1e6 / deadline)
    try:
        await engine.generate(ask.prompt, params, deadline=deadline, priority=priority, request_id=name)
    except Rejected:
        found.refused += 1
        return
    took = loop.time() - begin
    if deadline is None:
        found.free.append(took)
    elif took <= deadline:
        found.met += 1
    else:
        found.late += 1
    if name in Watched.expected:
        found.estimates.append(Watched.expected[name] / took)


Watched.expected = {}


def _settings(options: argparse.Namespace, policy: str | type) -> dict[str, Any]:
    return {
        "policy": policy,
        "max_running_requests": options.running,
        "max_queued_requests": options.requests,
        "max_queued_tokens": options.requests * max(PROMPTS),
        "max_step_tokens": 256,
        "prefix_cache": False,
        "speculation": "off",
    }


def _real(options: argparse.Namespace) -> Callable[[str | type], Engine]:
    def make(policy: str | type) -> Engine:
        return Engine(
            EngineConfig(model=options.model, threads=options.threads, **_settings(options, policy))
        )

    return make


def _simulated(options: argparse.Namespace) -> Callable[[str | type], Engine]:
    from aioinfer.testing import TimedLauncher
    from tests.toys import ToyDevice

    def seconds(step: Step) -> float:
        rows = step.generating
        decoding = 0.008 + 4e-4 * rows.num_tokens + 2e-7 * float(rows.starts.sum())
        return decoding + sum(row.length * (2e-4 + 1e-8 * row.start) for row in step.prefilling)

    def make(policy: str | type) -> Engine:
        settings = _settings(options, policy)
        config = EngineConfig(model="toy", page_size=16, num_pages=4000, itl_target=0.2, **settings)
        device = ToyDevice(num_pages=4000, page_size=16, num_slots=config.num_slots, vocab_size=VOCAB[1] + 1)
        launcher = TimedLauncher(device, seconds)
        return Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: None)

    return make
