"""A row that sampled nothing: its request goes on from what the host knows, and rows behind it are void.

The laws of the engine defer rows and force tokens at random, also of requests that are parked or retracted.
"""

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
    assert desk.scheduler.queues.counters.deferred_rows == 1


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
    tokens = [FORCED if row.request is eldest else 42 for row in step.rows]
    (at,) = [at for at, row in enumerate(step.rows) if row.request is eldest]
    desk.scheduler.resolve(step, Outcome(tokens, {at: list(range(50, 60))}))
    # Ten more tokens want three pages; the younger one makes room, the eldest is never retracted.
    for _ in range(3):
        step = desk.launch()
        assert other.state is SequenceState.WAITING
        assert eldest.recovery.retractions == 0
        if any(row.request is eldest for row in step.rows):
            break
    row = next(row for row in step.rows if row.request is eldest)
    assert row.ids == list(range(50, 60))
    desk.bring(step)
    assert eldest.output_ids[-1] == 42
