"""Requests of a model with recurrent state go back to where a state was kept."""

from __future__ import annotations

from aioinfer.params import SamplingParams
from aioinfer.sampling.outcomes import DEFERRED, FORCED
from aioinfer.scheduling.audit import check_idle
from tests.scheduling.cells import PAGE, bring, cell, course, desk, rows
from tests.sequences import new_sequence


def test_a_deferred_row_comes_again_from_the_last_snapshot() -> None:
    at = desk()
    request = at.submit(11, 20)
    course(at, request)
    at.plan()
    at.plan()
    bring(at, DEFERRED)
    assert request.pending == 0
    at.plan()
    (row,) = rows(at)
    assert (row.start, row.ids) == (8, [*request.prompt_ids[8:], 42]), "the slot's state has gone on"
    assert cell(at, row.state_read) == "kept"
    assert row.state_write == request.kv.slot
    bring(at, DEFERRED)  # void
    bring(at, 43)
    assert request.output_ids == [42, 43]
    at.plan()
    assert rows(at)[0].state_read == request.kv.slot


def test_repeated_rewinds_cost_about_a_page() -> None:
    at = desk(8)
    request = at.submit(11, 60)
    course(at, request)
    before = at.scheduler.queues.counters.prefill_tokens
    rewinds = 0
    while not request.finished:
        at.plan()
        while at.flights:
            deferred = rows(at)[-1].samples and not rows(at)[-1].ids
            rewinds += deferred
            bring(at, DEFERRED if deferred else 42)
    computed = at.scheduler.queues.counters.prefill_tokens - before
    assert rewinds == 59
    assert computed <= rewinds * (PAGE + 1)
    check_idle(at.scheduler)


def test_forced_tokens_leave_a_snapshot_behind_them() -> None:
    at = desk()
    request = at.submit(11, 60)
    course(at, request)
    at.plan()
    bring(at, FORCED, list(range(50, 60)))
    assert course(at, request) == [(8, 20, "kept", "kept"), (20, 22, "kept", "slot")]


def test_without_its_snapshot_a_request_begins_again_and_leaves_cached_pages_alone() -> None:
    at = desk(1)
    request = at.submit(11, 30)
    course(at, request)
    reader = at.submit(13, 30)  # takes the only cell
    course(at, reader)
    assert request.kv.cached_pages == 2
    shared = request.kv.pages[:2]
    at.scheduler.queues.park(reader)
    at.plan()
    bring(at, DEFERRED)
    assert not request.kv.cached_pages
    assert at.memory.tree is not None
    assert at.memory.tree.match(request.token_key(0, 8)) == 2, "what others may read stays"
    at.plan()
    row = next(row for row in rows(at) if row.sequence is request)
    assert (row.start, row.state_read) == (0, 0)
    assert not set(shared) & set(row.new_pages)
    at.resolve()
    at.scheduler.queues.unpark(reader)
    at.finish()
    check_idle(at.scheduler)


def test_a_retracted_request_continues_from_its_snapshot() -> None:
    at = desk()
    request = at.submit(11, 30)
    for _ in range(9):
        at.round()
    at.scheduler.queues.retract(request)
    found = course(at, request)
    assert found[0] == (8, 16, "kept", "kept"), "and leaves one where its pages end"
    assert found[-1][3] == "slot"
    at.finish()
    check_idle(at.scheduler)


def test_a_parked_prompt_goes_on_from_its_snapshot() -> None:
    at = desk(1)
    request = at.submit(11)
    at.round()
    at.scheduler.queues.park(request)
    for _ in range(3):
        at.submit(13, 1)
        at.round()
        at.round()
    at.scheduler.queues.unpark(request)
    assert course(at, request) == [(8, 11, "kept", "slot")]


def test_a_prompt_whose_logprobs_are_wanted_is_computed_whole_and_leaves_a_snapshot() -> None:
    at = desk()
    ids = list(range(100, 111))
    at.submit(ids)
    at.finish()
    request = new_sequence(
        7, ids, SamplingParams(max_tokens=9, prompt_logprobs=0), seed=0, stop_ids=frozenset(), max_length=20
    )
    at.scheduler.submit(request)
    assert course(at, request) == [(0, 8, "empty", "kept"), (8, 11, "kept", "slot")]
    assert at.memory.snapshots_cached == 1
    at.plan()
    bring(at, DEFERRED)
    at.plan()
    assert (rows(at)[0].start, rows(at)[0].scores) == (8, None), "no position is scored twice"
    at.finish()
    check_idle(at.scheduler)
