"""Decode steps that are skipped leave behind exactly what they leave one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from aioinfer.scheduling.costs import StepCosts
from aioinfer.twin.load import Session
from aioinfer.twin.outcome import Outcome
from aioinfer.twin.running import Event
from tests.tiers import FURTHER, nightly
from tests.twin.worlds import COSTS, conversations, played, requests

#: short steps, which the loop often reads late
JITTERY = msgspec.structs.replace(
    COSTS,
    step=StepCosts(0.0009, 0.0, 3e-7, 5e-8, (1e-5,)),
    host=msgspec.structs.replace(COSTS.host, notice=(5e-5, 1e-4, 2e-4, 1e-3, 5e-3)),
)
Load = Callable[[int], Iterator[Session]]

WORLDS: dict[str, tuple[Load, dict[str, Any]]] = {
    "one at a time": (lambda seed: requests(30, 0.3, 120, seed), {}),
    "several at a time": (lambda seed: requests(60, 3, 100, seed), {}),
    "more than there are slots": (lambda seed: requests(60, 20, 60, seed), {}),
    "fewer pages than they need": (
        lambda seed: requests(60, 20, 120, seed),
        {"settings": {"num_pages": 220}},
    ),
    "growing conversations": (lambda seed: conversations(25, 2, seed), {}),
    "a cache that is full": (lambda seed: conversations(30, 2, seed), {"settings": {"num_pages": 150}}),
    "two steps ahead": (lambda seed: requests(40, 3, 60, seed), {"settings": {"overlap_steps": 2}}),
    "no step ahead": (lambda seed: requests(40, 3, 60, seed), {"settings": {"overlap_steps": 0}}),
    "priorities": (lambda seed: urgent(40, seed), {"settings": {"policy": "priority", "preemption": True}}),
    "deadlines": (lambda seed: due(40, seed), {"settings": {"policy": "slack"}}),
    "steps shorter than the delay of the loop": (
        lambda seed: requests(40, 20, 80, seed),
        {"costs": JITTERY},
    ),
    "running timeouts": (
        lambda seed: impatient(40, seed),
        {"settings": {"running_timeout": 2.0, "max_running_requests": 6}},
    ),
    "three replicas": (lambda seed: requests(80, 8, 80, seed), {"replicas": 3}),
    "a replica is lost": (
        lambda seed: requests(80, 8, 80, seed),
        {"replicas": 3, "events": (Event(4.013, "kill", 1),)},
    ),
    "one leaves, one comes": (
        lambda seed: requests(80, 8, 80, seed),
        {"replicas": 2, "events": (Event(3.013, "drain", 0), Event(5.013, "join"))},
    ),
}


def urgent(count: int, seed: int) -> Iterator[Session]:
    for number, each in enumerate(requests(count, 8, 60, seed)):
        yield dataclasses.replace(each, priority=number % 3)


def impatient(count: int, seed: int) -> Iterator[Session]:
    for number, each in enumerate(requests(count, 8, 200, seed)):
        yield dataclasses.replace(
            each, options=(("running_timeout", 0.3 + number % 4),) if number % 2 else ()
        )


def due(count: int, seed: int) -> Iterator[Session]:
    for number, each in enumerate(requests(count, 8, 60, seed)):
        yield dataclasses.replace(each, options=(("deadline", 1.0 + number % 5),))


def same(mine: Outcome, theirs: Outcome) -> None:
    for each in dataclasses.fields(Outcome):
        assert repr(getattr(mine, each.name)) == repr(getattr(theirs, each.name)), each.name


def compare(name: str, seed: int) -> float:
    """The share of steps that are not simulated one by one."""
    load, options = WORLDS[name]
    exact, none = played(load(seed), exact=True, **options)
    columns, skipped = played(load(seed), exact=False, **options)
    assert not none
    same(exact, columns)
    return skipped / exact.steps


@pytest.mark.parametrize("name", WORLDS)
def test_columns_leave_what_steps_leave(name: str) -> None:
    skipped = compare(name, 1)
    if not name.endswith(("ahead", "timeouts", "loop")):
        assert skipped > 0.15, "hardly anything was skipped"


@nightly(FURTHER)
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("name", WORLDS)
def test_columns_leave_what_steps_leave_with_other_dice(name: str, seed: int) -> None:
    compare(name, seed)


def test_long_outputs_of_few_take_a_twentieth_of_the_events() -> None:
    exact, _ = played(requests(12, 0.1, 900, 3), exact=True)
    _, skipped = played(requests(12, 0.1, 900, 3), exact=False)
    assert exact.steps > 20 * (exact.steps - skipped)
