"""Costs, loads and comparisons for tests of the twin."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from aioinfer.config import EngineConfig
from aioinfer.scheduling.costs import Costs, HostCosts, StepCosts
from aioinfer.testing.virtual_time import VirtualLoop
from aioinfer.twin.load import Session, Turn, single
from aioinfer.twin.outcome import Outcome
from aioinfer.twin.running import Setup, Twin

#: a machine with noise: steps of 8 ms and more, and a host that is late at times
COSTS = Costs(
    step=StepCosts(0.008, 1e-5, 2e-7, 1e-8, (2e-4, 3e-4), (0, 16), 1e-3),
    noise=(0.7, 0.8, 0.95, 1.05, 1.1, 1.4),
    host=HostCosts(
        plan=(2e-4, 2e-6),
        read=(1e-4, 3e-6),
        notice=(1e-4, 2e-4, 5e-4, 4e-3),
        begin=1e-4,
        cold=5e-3,
        arrive=(1e-4, 1e-7),
    ),
    engine={"num_pages": 4000, "page_size": 16, "max_model_len": 4096},
)


def requests(count: int, rate: float, output: float, seed: int) -> Iterator[Session]:
    """Requests of their own prompts, at random."""
    dice, at = random.Random(seed), 0.0
    for number in range(count):
        at += dice.expovariate(rate)
        yield single(at, ((number + 1, dice.randint(3, 400)),), max(1, int(dice.expovariate(1 / output))))


def conversations(count: int, rate: float, seed: int) -> Iterator[Session]:
    """Sessions that share one of two beginnings and grow."""
    dice, at = random.Random(seed), 0.0
    for number in range(count):
        at += dice.expovariate(rate)
        shared = (1 + dice.randrange(2), 100)
        turns = [
            Turn(dice.expovariate(1.0) if turn else 0.0, pieces, dice.randint(1, 90))
            for turn in range(dice.randint(1, 4))
            for pieces in [((10 + 10 * number + turn, dice.randint(1, 120)),)]
        ]
        turns[0] = turns[0]._replace(pieces=(shared, *turns[0].pieces))
        yield Session(at, turns)


def played(load: Iterator[Session], *, exact: bool, **options: Any) -> tuple[Outcome, int]:
    """What came of a load, and the steps that were skipped."""
    settings = {
        "max_running_requests": 16,
        "max_step_tokens": 512,
        "chunk_size": 256,
        **options.pop("settings", {}),
    }
    setup = Setup(costs=options.pop("costs", COSTS), config=EngineConfig(**settings), exact=exact, **options)
    twin, loop = Twin(setup), VirtualLoop(setup.seed)
    try:
        outcome = loop.run_until_complete(twin.play(load))
    finally:
        loop.close()
    return outcome, sum(launcher.skipped for launcher in twin.launchers)
