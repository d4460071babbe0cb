"""Workloads of several replicas, and their run in virtual time on toy devices with a model of their cost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.parallel import Dispatcher
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step
from aioinfer.testing import TimedLauncher, VirtualLoop
from tests.toys import ToyDevice

__all__ = ["WORKLOADS", "run_workload"]

VOCAB = 4096
#: seconds of a step, of a token of prefill and of a decode row: a device that prefills 20,000 tokens/s
STEP, PREFILL, DECODE = 4e-3, 5e-5, 1e-4
PAGES, PAGE = 4096, 16


class Turn(NamedTuple):
    """A request of a session: its prompt's new tokens, its output's tokens, and seconds before it."""

    prompt: list[int]
    output: int
    wait: float


class Session(NamedTuple):
    """Requests that follow each other; each has the prompts and outputs of those before it."""

    arrival: float
    turns: list[Turn]


def bursts(dice: random.Random) -> Iterator[Session]:
    """Sixty requests at once, every second."""
    for second in range(8):
        for _ in range(60):
            yield Session(float(second), [Turn(_tokens(dice, 300), 32, 0.0)])


def hot(dice: random.Random) -> Iterator[Session]:
    """All begin with one long system prompt."""
    system = _tokens(dice, 768)
    for arrival in _arrivals(dice, 700, 100.0):
        yield Session(arrival, [Turn([*system, *_tokens(dice, 40)], 48, 0.0)])


def agentic(dice: random.Random) -> Iterator[Session]:
    """Sessions of ten calls whose prompts grow, with tools between them."""
    for arrival in _arrivals(dice, 90, 8.0):
        turns = [Turn(_tokens(dice, 1200), 40, 0.0)]
        turns += [Turn(_tokens(dice, 150), 40, dice.uniform(0.2, 1.5)) for _ in range(9)]
        yield Session(arrival, turns)


WORKLOADS: dict[str, Callable[[random.Random], Iterator[Session]]] = {
    "bursts": bursts,
    "hot prefix": hot,
    "agentic": agentic,
}


def _arrivals(dice: random.Random, count: int, rate: float) -> Iterator[float]:
    now = 0.0
    for _ in range(count):
        now += dice.expovariate(rate)
        yield now


def _tokens(dice: random.Random, count: int) -> list[int]:
    return dice.choices(range(1, VOCAB), k=count)


def _seconds(step: Step) -> float:
    return STEP + PREFILL * step.prefill_tokens + DECODE * step.num_generating


def _engine(seed: int) -> Engine:
    config = EngineConfig(
        model="toy",
        seed=seed,
        num_pages=PAGES,
        page_size=PAGE,
        max_running_requests=64,
        max_step_tokens=1024,
        max_queued_requests=10_000,
        max_queued_tokens=10_000_000,
        overlap_steps=1,
        speculation="off",
    )

    def launcher(_: EngineConfig) -> TimedLauncher:
        device = ToyDevice(
            num_pages=PAGES, page_size=PAGE, num_slots=config.num_slots, vocab_size=VOCAB, max_model_len=8192
        )
        return TimedLauncher(device, _seconds)

    return Engine(config, launcher=launcher, tokenizer=lambda _: None)


def run_workload(workload: str, policy: str, replicas: int, seed: int) -> dict[str, Any]:
    """TTFT of every request and the time of all of them, in virtual seconds."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        return runner.run(_run(workload, policy, replicas, seed))


async def _run(workload: str, policy: str, replicas: int, seed: int) -> dict[str, Any]:
    ttft: list[float] = []

    async def follow(session: Session) -> None:
        await asyncio.sleep(session.arrival)
        context: list[int] = []
        for turn in session.turns:
            await asyncio.sleep(turn.wait)
            context += turn.prompt
            params = SamplingParams(max_tokens=turn.output, ignore_eos=True, seed=1)
            result = await dispatcher.generate(list(context), params)
            assert result.metrics is not None
            assert result.metrics.ttft is not None
            ttft.append(result.metrics.ttft)
            context += result.token_ids

    sessions = list(WORKLOADS[workload](random.Random(seed)))
    async with Dispatcher([_engine(each) for each in range(replicas)], policy=policy) as dispatcher:
        async with asyncio.TaskGroup() as group:
            for session in sessions:
                group.create_task(follow(session))
        return {
            "ttft": sorted(ttft),
            "hit_rate": dispatcher.stats().hit_rate,
        }
