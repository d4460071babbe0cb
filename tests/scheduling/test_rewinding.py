"""A row that sampled nothing: its request goes on from what the host knows, and rows behind it are void."""

from __future__ import annotations

from collections import abc

import pytest

from aioinfer.sampling.outcomes import DEFERRED, FORCED
from aioinfer.scheduling.audit import check_idle
from aioinfer.scheduling.sequence import Sequence, SequenceState
from aioinfer.scheduling.step import Outcome
from tests.scheduling.desk import Desk, only


def started(prefix_cache: bool = False, **options: int) -> tuple[Desk, Sequence]:
    """A request with its first token, 42."""
    desk = Desk(running=8, prefix_cache=prefix_cache, **options)
    request = desk.submit(6, 20)
    assert desk.bring(desk.launch()) == [request]
    return desk, request


def test_a_deferred_row_comes_again_with_its_token() -> None:
    desk, request = started()
    first, behind = desk.launch(), desk.launch()
    assert desk.bring(first, DEFERRED) == []
    again = desk.launch()
    row = only(again)
    assert (row.start, row.ids, row.samples) == (6, [42], True)
    assert row.new_request is not None, "counts of penalties have seen what was never sampled"
    assert row.new_pages == request.kv.pages
    assert desk.bring(behind, DEFERRED) == []
    assert desk.bring(again, 43) == [request]
    assert request.output_ids == [42, 43]
    assert only(desk.launch()).start == 7


def test_forced_tokens_are_computed_in_one_row() -> None:
    desk, request = started()
    first, behind = desk.launch(), desk.launch()
    assert desk.bring(first, FORCED, [50, 51, 52]) == [request]
    assert request.output_ids == [42, 50, 51, 52]
    again = desk.launch()
    assert (only(again).start, only(again).ids) == (7, [50, 51, 52])
    assert desk.bring(behind, DEFERRED) == []
    assert desk.bring(again, 53) == [request]
    assert request.output_ids == [42, 50, 51, 52, 53]


@pytest.mark.parametrize(
    ("forced", "left", "reason"), [([50, 7, 51], [50, 7], "stop"), (range(50, 90), range(50, 69), "length")]
)
def test_forced_tokens_end_where_any_others_would(
    forced: abc.Sequence[int], left: abc.Sequence[int], reason: str
) -> None:
    desk, request = started(prefix_cache=True)
    step, behind = desk.launch(), desk.launch()
    assert desk.bring(step, FORCED, forced) == [request]
    assert request.output_ids == [42, *left]
    assert request.output.finish_reason == reason
    desk.bring(behind, DEFERRED)
    check_idle(desk.scheduler)
    # What was never computed is not offered to others.
    assert desk.memory.pages.cached * desk.memory.pages.page_size <= 7


def test_forced_tokens_find_their_pages_or_wait_for_them() -> None:
    desk, eldest = started(pages=5)
    other = desk.submit(4, 8)
    desk.bring(desk.launch())
    assert other.state is SequenceState.RUNNING
    step = desk.launch()
    tokens = [FORCED if row.sequence is eldest else 42 for row in step.rows]
    (at,) = [at for at, row in enumerate(step.rows) if row.sequence is eldest]
    desk.scheduler.resolve(step, Outcome(tokens, {at: list(range(50, 60))}))
    # Ten more tokens want three pages; the younger one makes room, the eldest is never retracted.
    for _ in range(3):
        step = desk.launch()
        assert other.state is SequenceState.WAITING
        assert eldest.recovery.retractions == 0
        if any(row.sequence is eldest for row in step.rows):
            break
    row = next(row for row in step.rows if row.sequence is eldest)
    assert row.ids == list(range(50, 60))
    desk.bring(step)
    assert eldest.output_ids[-1] == 42


def test_a_row_may_be_deferred_again_and_again() -> None:
    desk, request = started()
    for _ in range(5):
        assert desk.bring(desk.launch(), DEFERRED) == []
    assert desk.scheduler.queues.counters.deferred_rows == 5
    assert request.pending == 0


def test_what_comes_for_a_retracted_request_is_counted_in() -> None:
    desk, request = started()
    first, behind = desk.launch(), desk.launch()
    desk.scheduler.queues.retract(request)
    queued = desk.scheduler.queues.queued_tokens
    assert desk.bring(first, FORCED, [50, 51, 52]) == [request]
    assert desk.scheduler.queues.queued_tokens == queued + 1, "two placeholders became three tokens"
    assert request.pending == 0
    desk.bring(behind, DEFERRED)
    again = desk.launch()
    assert only(again).ids == [*request.prompt_ids, 42, 50, 51, 52]
    desk.bring(again)


def test_a_parked_request_is_rewound_where_it_is() -> None:
    desk, request = started(pages=8)
    step = desk.launch()
    desk.scheduler.queues.park(request)
    assert desk.bring(step, FORCED, list(range(50, 62))) == [request]
    assert desk.scheduler.plan() is None
    desk.scheduler.queues.unpark(request)
    assert only(desk.launch()).ids == list(range(50, 62))


def test_the_last_chunk_of_a_prompt_may_be_deferred() -> None:
    desk = Desk(prefix_cache=False, chunk_size=4)
    request = desk.submit(6, 3)
    first, last = desk.launch(), desk.launch()
    assert desk.bring(first) == []
    assert desk.bring(last, DEFERRED) == []
    again = desk.launch()
    assert (only(again).start, only(again).length) == (5, 1)
    assert desk.bring(again) == [request]


def test_the_last_token_by_length_may_be_deferred() -> None:
    desk, request = started()
    while request.length < request.max_length - 1:
        desk.bring(desk.launch())
    last = desk.launch()
    assert last.generating.ending == [request]
    assert desk.bring(last, DEFERRED) == []
    assert not request.finished
    desk.bring(desk.launch())
    assert request.output.finish_reason == "length"
    assert len(request.output_ids) == 20
    check_idle(desk.scheduler)
