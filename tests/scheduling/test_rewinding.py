"""A row that sampled nothing: its request goes on from what the host knows, and rows behind it are void."""

from __future__ import annotations

from collections import abc

import pytest

from aioinfer.sampling.outcomes import DEFERRED, FORCED, NO_TOKEN
from aioinfer.scheduling.audit import audit, check_idle
from aioinfer.scheduling.sequence import Sequence, SequenceState
from aioinfer.scheduling.step import Outcome, Row, Step
from tests.scheduling.test_pitfalls import Bench


def bring(bench: Bench, step: Step, token: int, forced: abc.Sequence[int] = ()) -> list[Sequence]:
    """Resolve a step with one row."""
    assert step.num_rows == 1
    return bench.scheduler.resolve(step, Outcome([token], {0: forced} if forced else {}))


def only(step: Step) -> Row:
    (row,) = step.rows
    return row


def started(**options: int) -> tuple[Bench, Sequence]:
    """A request with its first token, 42."""
    bench = Bench(**options)
    request = bench.request(prompt=6, max_tokens=20)
    step, _ = bench.plan()
    assert bring(bench, step, 42) == [request]
    return bench, request


def test_a_deferred_row_comes_again_with_its_token() -> None:
    bench, request = started()
    first, _ = bench.plan()
    behind, _ = bench.plan()
    assert bring(bench, first, DEFERRED) == []
    again, packed = bench.plan()
    row = only(again)
    assert (row.start, row.ids, row.samples) == (6, [42], True)
    assert row.new_request is not None, "counts of penalties have seen what was never sampled"
    assert row.new_pages == request.kv.pages
    assert packed.num_decodes == 0
    assert bring(bench, behind, DEFERRED) == []
    assert bring(bench, again, 43) == [request]
    assert request.output_ids == [42, 43]
    assert only(bench.plan()[0]).start == 7
    audit(bench.scheduler)


def test_a_row_may_be_deferred_again_and_again() -> None:
    bench, request = started()
    for _ in range(5):
        step, _ = bench.plan()
        assert bring(bench, step, DEFERRED) == []
    assert bench.scheduler.queues.counters.deferred_rows == 5
    assert request.pending == 0
    audit(bench.scheduler)


def test_forced_tokens_are_computed_in_one_row() -> None:
    bench, request = started()
    first, _ = bench.plan()
    behind, _ = bench.plan()
    assert bring(bench, first, FORCED, [50, 51, 52]) == [request]
    assert request.output_ids == [42, 50, 51, 52]
    again, _ = bench.plan()
    assert (only(again).start, only(again).ids) == (7, [50, 51, 52])
    assert bring(bench, behind, DEFERRED) == []
    assert bring(bench, again, 53) == [request]
    assert request.output_ids == [42, 50, 51, 52, 53]
    audit(bench.scheduler)


@pytest.mark.parametrize(
    ("forced", "left", "reason"), [([50, 7, 51], [50, 7], "stop"), (range(50, 90), range(50, 69), "length")]
)
def test_forced_tokens_end_where_any_others_would(
    forced: abc.Sequence[int], left: abc.Sequence[int], reason: str
) -> None:
    bench, request = started(prefix_cache=True)
    step, _ = bench.plan()
    behind, _ = bench.plan()
    assert bring(bench, step, FORCED, forced) == [request]
    assert request.output_ids == [42, *left]
    assert request.output.finish_reason == reason
    bring(bench, behind, DEFERRED)
    check_idle(bench.scheduler)
    # What was never computed is not offered to others.
    assert bench.memory.pages.cached * bench.memory.pages.page_size <= 7


def test_forced_tokens_find_their_pages_or_wait_for_them() -> None:
    bench, eldest = started(pages=5)
    other = bench.request(prompt=4, max_tokens=8)
    step, _ = bench.plan()
    bench.resolve(step)
    assert other.state is SequenceState.RUNNING
    step, _ = bench.plan()
    tokens = [FORCED if row.request is eldest else 42 for row in step.rows]
    (at,) = [at for at, row in enumerate(step.rows) if row.request is eldest]
    bench.scheduler.resolve(step, Outcome(tokens, {at: list(range(50, 60))}))
    # Ten more tokens want three pages; the younger one makes room, the eldest is never retracted.
    for _ in range(3):
        step, _ = bench.plan()
        audit(bench.scheduler)
        assert other.state is SequenceState.WAITING
        assert eldest.recovery.retractions == 0
        if any(row.request is eldest for row in step.rows):
            break
    row = next(row for row in step.rows if row.request is eldest)
    assert row.ids == list(range(50, 60))
    bench.resolve(step)
    assert eldest.output_ids[-1] == 42


def test_what_comes_for_a_retracted_request_is_counted_in() -> None:
    bench, request = started()
    first, _ = bench.plan()
    behind, _ = bench.plan()
    bench.scheduler.queues.retract(request)
    queued = bench.scheduler.queues.queued_tokens
    assert bring(bench, first, FORCED, [50, 51, 52]) == [request]
    assert bench.scheduler.queues.queued_tokens == queued + 1, "two placeholders became three tokens"
    assert request.pending == 0
    bring(bench, behind, DEFERRED)
    again, _ = bench.plan()
    assert only(again).ids == [*request.prompt_ids, 42, 50, 51, 52]
    bench.resolve(again)
    audit(bench.scheduler)


def test_a_parked_request_is_rewound_where_it_is() -> None:
    bench, request = started(pages=8)
    step, _ = bench.plan()
    bench.scheduler.queues.park(request)
    assert bring(bench, step, FORCED, list(range(50, 62))) == [request]
    assert bench.scheduler.plan() is None
    audit(bench.scheduler)
    bench.scheduler.queues.unpark(request)
    step, _ = bench.plan()
    assert only(step).ids == list(range(50, 62))
    audit(bench.scheduler)


def test_the_last_chunk_of_a_prompt_may_be_deferred() -> None:
    bench = Bench(chunk=4)
    request = bench.request(prompt=6, max_tokens=3)
    first, _ = bench.plan()
    last, _ = bench.plan()
    assert bring(bench, first, NO_TOKEN) == []
    assert bring(bench, last, DEFERRED) == []
    again, _ = bench.plan()
    assert (only(again).start, only(again).length) == (5, 1)
    assert bring(bench, again, 42) == [request]


def test_the_last_token_by_length_may_be_deferred() -> None:
    bench, request = started()
    while request.length < request.max_length - 1:
        bench.resolve(bench.plan()[0])
    last, _ = bench.plan()
    assert last.generating.ending == [request]
    assert bring(bench, last, DEFERRED) == []
    assert not request.finished
    bench.resolve(bench.plan()[0])
    assert request.output.finish_reason == "length"
    assert len(request.output_ids) == 20
    check_idle(bench.scheduler)
