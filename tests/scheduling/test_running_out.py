"""A step ran out of memory: its requests start over, in smaller steps, and nothing behind it counts.

The scheduler's state machine has steps run out at any moment, and knows what may come of it.
"""

from __future__ import annotations

import itertools

import pytest

from aioinfer.sampling.outcomes import BAD_LOGITS, FORCED
from aioinfer.scheduling.audit import audit
from aioinfer.scheduling.recovery import StepCap
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import NO_ROWS, Step
from tests.scheduling.desk import STOP, Desk, only


class Shortage(RuntimeError):
    """What the device raised."""


def run_out(desk: Desk, step: Step, *, capped: bool = False) -> list[Sequence]:
    """Unless it is about the cap, the next step may have as much again."""
    failed = desk.scheduler.run_out(step, Shortage())
    if not capped:
        desk.scheduler.cap = StepCap(desk.scheduler.config.step_tokens)
    audit(desk.scheduler)
    return failed


@pytest.mark.parametrize("junk", [50, STOP, BAD_LOGITS, FORCED])
def test_what_is_in_flight_behind_it_is_neither_delivered_nor_counted(junk: int) -> None:
    """A token, the end token, a failure, tokens that were forced: whatever it is. It still writes."""
    desk = Desk(prefix_cache=False)
    request = desk.submit(6, 20)
    desk.bring(desk.launch())
    held, slot = set(request.kv.pages), request.kv.slot
    first, second, third = (desk.launch() for _ in range(3))
    assert run_out(desk, first) == []
    assert request.pending == 0
    again = desk.launch()
    assert only(again).ids == [*request.prompt_ids, 42]
    assert only(again).new_request is not None
    assert only(again).slot != slot
    assert not held & set(request.kv.pages)
    for step in (second, third):
        assert desk.bring(step, junk, [50, 51] if junk == FORCED else ()) == []
    assert desk.bring(again, 43) == [request]
    assert request.output_ids == [42, 43]
    counters = desk.scheduler.queues.counters
    assert (counters.out_of_memory_retries, counters.late_tokens) == (1, 0)


def test_a_second_time_without_a_token_in_between_ends_the_longest() -> None:
    """Steps in flight that run out, too, are the same time."""
    desk = Desk(prefix_cache=False)
    short, long = desk.submit(2, 20), desk.submit(4, 20)
    for count in (1, 2, 3):
        while len(long.output_ids) < count:
            desk.bring(desk.launch())
        for step in (desk.launch(), desk.launch()):
            assert run_out(desk, step) == []
    assert run_out(desk, desk.launch()) == [long]
    assert isinstance(long.output.error, Shortage)
    assert desk.scheduler.queues.counters.out_of_memory_retries == 7
    desk.finish()
    assert short.output.finish_reason == "length"


def test_requests_come_again_in_their_old_order_before_others() -> None:
    desk = Desk(running=3, prefix_cache=False)
    first, second, third, other = (desk.submit(4) for _ in range(4))
    step = desk.launch()
    assert step.num_rows == 3
    run_out(desk, step)
    assert list(desk.scheduler.queues.waiting) == [first, second, third, other]
    assert [row.sequence for row in desk.launch().rows] == [first, second, third]


def test_prompt_and_decodes_share_what_the_memory_holds() -> None:
    desk = Desk(running=8, prefix_cache=False)
    requests = [desk.submit(8, 100) for _ in range(8)]
    run_out(desk, desk.launch(), capped=True)
    sizes = []
    while not all(request.output_ids for request in requests):
        step = desk.launch()
        sizes.append(step.num_tokens)
        desk.bring(step)
    assert sizes[0] == 32
    assert len(sizes) < 20


def _step(step_id: int, tokens: int) -> Step:
    return Step(step_id, NO_ROWS, (), tokens)


def test_the_cap_halves_stays_and_recovers() -> None:
    cap = StepCap(100)
    cap.ran_out(_step(5, 80), newest=7)
    assert cap.tokens == 40
    cap.ran_out(_step(6, 60), newest=8)
    assert cap.tokens == 30
    for _ in range(16):
        cap.fitted()
        assert cap.tokens == 30
    seen = []
    while cap.tokens < 100:
        cap.fitted()
        seen.append(cap.tokens)
    assert seen == sorted(set(seen))
    assert len(seen) < 20
    cap.fitted()
    assert cap.tokens == 100


def test_what_runs_out_again_and_again_waits_longer_every_time() -> None:
    def steps_until(cap: StepCap, tokens: int) -> int:
        count = 0
        while cap.tokens < tokens:
            cap.fitted()
            count += 1
        return count

    cap, waits = StepCap(100), []
    for step_id in range(1, 6):
        cap.ran_out(_step(step_id, 100), newest=step_id)
        waits.append(steps_until(cap, 100))
    assert [later - earlier for earlier, later in itertools.pairwise(waits)] == [16, 32, 64, 128]
    for _ in range(1000):
        cap.fitted()
    cap.ran_out(_step(9, 100), newest=9)
    assert steps_until(cap, 100) == waits[0], "all is forgotten"
