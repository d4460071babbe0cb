"""When the memory of a request that has ended is free again: the steps in flight, and no step more."""

from __future__ import annotations

import pytest

from aioinfer.scheduling.audit import check_idle
from aioinfer.scheduling.sequence import Sequence
from tests.scheduling.desk import STOP, Desk


def fill(desk: Desk, window: int) -> None:
    while len(desk.flights) <= window and desk.plan():
        pass


def decoding(window: int) -> tuple[Desk, Sequence]:
    """A request in every step of a full window."""
    desk = Desk(prefix_cache=False)
    request = desk.submit(9, 40)
    for _ in range(5):
        fill(desk, window)
        desk.bring(desk.flights.pop(0))
    fill(desk, window)
    assert len(desk.flights) == window + 1
    return desk, request


def steps_until_free(desk: Desk, window: int) -> int:
    """Resolved steps until every page is free, while the engine goes on planning."""
    pages, resolved = desk.memory.pages, 0
    while pages.free < pages.total or desk.memory.slots.free < desk.memory.slots.total:
        assert desk.flights, "nothing is in flight, and something is not free"
        desk.bring(desk.flights.pop(0))
        resolved += 1
        fill(desk, window)
    check_idle(desk.scheduler)
    return resolved


@pytest.mark.parametrize("window", [0, 1, 2])
def test_an_aborted_requests_memory_is_free_when_the_window_has_resolved(window: int) -> None:
    """``overlap_steps`` + 1 steps: two with the default of one, three with two."""
    desk, request = decoding(window)
    desk.scheduler.finish(request, "abort")
    assert steps_until_free(desk, window) == window + 1


@pytest.mark.parametrize("window", [0, 1, 2])
def test_a_stopped_requests_memory_is_free_one_step_earlier(window: int) -> None:
    """The step that brought the end is none of those to wait for."""
    desk, request = decoding(window)
    desk.bring(desk.flights.pop(0), STOP)
    assert request.output.finish_reason == "stop"
    assert steps_until_free(desk, window) == window


@pytest.mark.parametrize("window", [0, 1, 2])
def test_a_request_of_known_length_leaves_nothing_behind(window: int) -> None:
    """No step is launched for it behind the one that brings its last token."""
    desk = Desk(prefix_cache=False)
    request = desk.submit(9, 4)
    while not request.finished:
        fill(desk, window)
        desk.bring(desk.flights.pop(0))
    assert steps_until_free(desk, window) == 0
