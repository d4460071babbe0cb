"""A step ran out of memory: its requests start over, in smaller steps, and nothing behind it counts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from aioinfer.sampling.outcomes import BAD_LOGITS, FORCED
from aioinfer.scheduling.audit import audit, check_idle
from aioinfer.scheduling.recovery import StepCap
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import NO_ROWS, Outcome, Row, Step
from tests.scheduling.test_pitfalls import Bench


class Shortage(RuntimeError):
    """What the device raised."""


def run_out(bench: Bench, step: Step, *, capped: bool = False) -> list[Sequence]:
    """Unless it is about the cap, the next step may have as much again."""
    failed = bench.scheduler.run_out(step, Shortage())
    if not capped:
        bench.scheduler.cap = StepCap(bench.scheduler.config.step_tokens)
    audit(bench.scheduler)
    return failed


def only(step: Step) -> Row:
    (row,) = step.rows
    return row


def started(**options: Any) -> tuple[Bench, Sequence]:
    """A request with its first token, 42."""
    bench = Bench(**options)
    request = bench.request(prompt=6, max_tokens=20)
    bench.resolve(bench.plan()[0])
    assert request.output_ids == [42]
    return bench, request


@pytest.mark.parametrize("junk", [50, 7, BAD_LOGITS, FORCED])
def test_what_is_in_flight_behind_it_is_neither_delivered_nor_counted(junk: int) -> None:
    """A token, the end token, a failure, tokens that were forced: whatever it is."""
    bench, request = started()
    first, second, third = (bench.plan()[0] for _ in range(3))
    assert run_out(bench, first) == []
    assert request.pending == 0
    again, _ = bench.plan()
    assert only(again).ids == [*request.prompt_ids, 42]
    assert only(again).new_request is not None
    for step in (second, third):
        assert bench.scheduler.resolve(step, Outcome([junk], {0: [50, 51]} if junk == FORCED else {})) == []
    assert bench.resolve(again, 43) == [request]
    assert request.output_ids == [42, 43]
    assert bench.scheduler.queues.counters.out_of_memory_retries == 1
    assert bench.scheduler.queues.counters.late_tokens == 0


def test_pages_and_slot_wait_for_the_steps_in_flight() -> None:
    bench, request = started()
    held = set(request.kv.pages)
    slot = request.kv.slot
    first, second = (bench.plan()[0] for _ in range(2))
    run_out(bench, first)
    again, _ = bench.plan()
    assert only(again).slot != slot
    assert not held & set(request.kv.pages), "still written by the step in flight"
    bench.resolve(second)
    assert bench.memory.pages.fenced == 0


def test_requests_come_again_in_their_old_order_before_others() -> None:
    bench = Bench(running=3)
    first, second, third, other = (bench.request(prompt=4) for _ in range(4))
    step, _ = bench.plan()
    assert step.num_rows == 3
    run_out(bench, step)
    assert list(bench.scheduler.queues.waiting) == [first, second, third, other]
    again, _ = bench.plan()
    assert [row.request for row in again.rows] == [first, second, third]


def test_a_second_time_without_a_token_in_between_ends_one_of_them() -> None:
    bench = Bench()
    short, long = bench.request(prompt=2), bench.request(prompt=4)
    for _ in range(2):
        assert not long.finished
        failed = run_out(bench, bench.plan()[0])
    assert failed == [long]
    assert isinstance(long.output.error, Shortage)
    while not short.output_ids:
        bench.resolve(bench.plan()[0])
    bench.scheduler.finish(short, "abort")
    check_idle(bench.scheduler)


def test_a_token_in_between_makes_it_the_first_time_again() -> None:
    bench, request = started()
    for count in range(2, 6):
        assert run_out(bench, bench.plan()[0]) == []
        while len(request.output_ids) < count:
            bench.resolve(bench.plan()[0])
    assert bench.scheduler.queues.counters.out_of_memory_retries == 4


def test_steps_in_flight_that_run_out_too_are_the_same_misfortune() -> None:
    bench, request = started()
    steps = [bench.plan()[0] for _ in range(3)]
    other = bench.request(prompt=3)
    steps.append(bench.plan()[0])
    for step in steps:
        assert run_out(bench, step) == []
    assert bench.scheduler.queues.counters.out_of_memory_retries == 2, "the other one was in the last of them"
    assert request.recovery.retractions == other.recovery.retractions == 1


def test_prompt_and_decodes_share_what_the_memory_holds() -> None:
    bench = Bench(running=8, budget=64)
    requests = [bench.request(prompt=8) for _ in range(8)]
    run_out(bench, bench.plan()[0], capped=True)
    sizes = []
    while not all(request.output_ids for request in requests):
        step, _ = bench.plan()
        sizes.append(step.num_tokens)
        bench.resolve(step)
        audit(bench.scheduler)
    assert sizes[0] == 32
    assert len(sizes) < 20


def step_of(step_id: int, tokens: int) -> Step:
    return Step(step_id, NO_ROWS, (), tokens)


def test_the_cap_halves_stays_and_recovers() -> None:
    cap = StepCap(100)
    cap.ran_out(step_of(5, 80), newest=7)
    assert cap.tokens == 40
    cap.ran_out(step_of(6, 60), newest=8)
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


def test_who_runs_out_again_and_again_waits_longer_every_time() -> None:
    def steps_until(cap: StepCap, tokens: int) -> int:
        count = 0
        while cap.tokens < tokens:
            cap.fitted()
            count += 1
        return count

    cap, waits = StepCap(100), []
    for step_id in range(1, 6):
        cap.ran_out(step_of(step_id, 100), newest=step_id)
        waits.append(steps_until(cap, 100))
    assert [later - earlier for earlier, later in itertools.pairwise(waits)] == [16, 32, 64, 128]
    for _ in range(1000):
        cap.fitted()
    cap.ran_out(step_of(9, 100), newest=9)
    assert steps_until(cap, 100) == waits[0], "all is forgotten"
