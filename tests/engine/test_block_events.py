"""Whatever happens between any two events of a diffusion engine, others get what they were to get.

``python -m tests.engine.test_block_events`` takes every moment with all settings; the suite takes some.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer.execution.device import StepOutOfMemory
from aioinfer.scheduling.sequence import Sequence, SequenceState
from tests.engine.block_course import SIZE, Course, ask
from tests.engine.worlds import Injected
from tests.tiers import SECONDS, grid, rest

Action = Callable[[Course], None]


def running(course: Course) -> list[Sequence]:
    return [each for each in course.requests if each.state is SequenceState.RUNNING]


def cancel(course: Course) -> None:
    for request in course.requests[:1]:
        course.core.abort(request)


def retract(course: Course) -> None:
    for request in running(course):
        course.take_away(request)


def retract_last(course: Course) -> None:
    for request in running(course)[-1:]:
        course.take_away(request)


def park(course: Course) -> None:
    """For a while."""
    for request in course.requests:
        if not request.finished:
            course.scheduler.queues.park(request)
            course.parked_until[request.key] = course.events + 5


def park_and_retract(course: Course) -> None:
    park(course)
    retract(course)


def flush(course: Course) -> None:
    course.scheduler.memory.flush()


def fail(course: Course) -> None:
    course.next_fault = Injected("the step fails")


def fail_late(course: Course) -> None:
    course.next_late_fault = Injected("the step fails when all is computed")


def break_logits(course: Course) -> None:
    course.next_logits_broken = True


def run_out(course: Course) -> None:
    course.next_fault = StepOutOfMemory("too much")


def run_out_late(course: Course) -> None:
    course.next_late_fault = StepOutOfMemory("too much, at the end")


def arrive(course: Course) -> None:
    """The same prompt again, which may be cached, may be computed right now, and may not."""
    course.arrive(course.asked[0])


def arrive_urgently(course: Course) -> None:
    course.arrive(ask([9] * 6, max_tokens=5), priority=5)


ACTIONS: tuple[Action, ...] = (
    *(cancel, retract, retract_last, park, park_and_retract, flush, fail, fail_late),
    *(break_logits, run_out, run_out_late, arrive, arrive_urgently),
)

#: who may be ended by what happens
ENDS = (cancel, fail, fail_late, break_logits)
#: two at a time differ in how far they are; a third waits, or does not
ASKED = [
    ask([1, 2, 3, 4, 5, 6, 8, 9, 7, 11], "joint_threshold"),
    ask([1, 2, 3, 4, 5, 6], max_tokens=7, temperature=1.0, seed=3),
    ask([12, 13], max_tokens=9),
]
SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"overlap_steps": 0, "max_rounds": 3},
    {"overlap_steps": 2, "fused_commit": False},
    {"diffusion_mode": "sync", "overlap_steps": 1},
    {"page_size": 4 * SIZE, "num_pages": 10, "max_rounds": 2},
    {"max_step_tokens": 2 * SIZE, "chunk_size": 1, "max_running_requests": 2, "policy": "priority"},
    {"mixed": False, "max_running_requests": 1, "preemption": True, "policy": "priority"},
    {"num_pages": 10, "preemption": True, "policy": "priority", "prefix_cache": False},
)


def course(settings: dict[str, Any], at: int, action: Action) -> None:
    taken = Course(ASKED, **settings)
    taken.run(at, action)
    taken.verify(may_fail=action in ENDS)
    if action in (cancel, break_logits):
        assert sum(request.output.finish_reason == "abort" for request in taken.requests) <= 1, (
            "and nobody else"
        )


def moments(settings: dict[str, Any]) -> int:
    """Of the course if nothing happens."""
    whole = Course(ASKED, **settings)
    whole.run()
    whole.verify()
    return whole.events


@rest(SECONDS)
def test_a_cancel_between_any_two_events_changes_no_other_token() -> None:
    for at in range(moments({})):
        course({}, at, cancel)


@rest(SECONDS)
@pytest.mark.parametrize("settings", grid(SETTINGS[1:3], SETTINGS[:1] + SETTINGS[3:]), ids=str)
def test_anything_between_two_events_changes_no_token(settings: dict[str, Any]) -> None:
    dice = random.Random(str(settings))
    count = moments(settings)
    for action in ACTIONS:
        course(settings, dice.randrange(count), action)


def main() -> None:
    runs = 0
    for settings in SETTINGS:
        count = moments(settings)
        for action in ACTIONS:
            for at in range(count):
                course(settings, at, action)
                runs += 1
        print(f"{runs} courses: {settings}", flush=True)


if __name__ == "__main__":
    main()
