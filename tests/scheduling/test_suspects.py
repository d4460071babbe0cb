"""Requests of a step that raised go on alone, whatever holds the place that they need."""

from __future__ import annotations

import pytest

from aioinfer.scheduling.audit import audit
from aioinfer.scheduling.cursor import TokenCursor
from aioinfer.scheduling.sequence import ParkedFor, Sequence
from tests.scheduling.desk import Desk

READER = ParkedFor.READER


class Broken(Exception):
    """What a step raised."""


def fail(desk: Desk) -> list[Sequence]:
    failed = desk.scheduler.fail(desk.launch(), Broken())
    audit(desk.scheduler)
    return failed


def one_is_left_out(desk: Desk) -> tuple[Sequence, Sequence, Sequence]:
    """Two requests run; a step of one of them and of the third raised, and it came no further since."""
    first, suspect = desk.submit(4, 20), desk.submit(4, 20, priority=1)
    desk.round()
    assert fail(desk) == []
    desk.scheduler.queues.park(suspect, READER)
    assert desk.round() == [first]
    other = desk.submit(4, 20)
    desk.round()
    assert set(desk.round()) == {first, other}
    desk.scheduler.queues.unpark(suspect, READER)
    return first, other, suspect


def test_a_suspect_takes_the_place_of_a_parked_request_alone() -> None:
    desk = Desk(running=2, prefix_cache=False)
    first, other, suspect = one_is_left_out(desk)
    assert set(desk.round()) == {first, other}, "there is no place for it"
    desk.scheduler.queues.park(other, READER)
    assert desk.round() == [suspect]
    assert set(desk.round()) == {first, suspect}
    desk.scheduler.queues.unpark(other, READER)
    desk.finish()


def test_a_suspect_takes_the_place_of_a_less_important_request_alone() -> None:
    desk = Desk("priority", running=2, prefix_cache=False, preemption=True)
    first, other, suspect = one_is_left_out(desk)
    assert desk.round() == [first], "who is displaced goes, and the suspect waits for its turn"
    assert desk.round() == [suspect]
    assert set(desk.round()) == {first, suspect}
    assert other.recovery.retractions == 1
    desk.finish()


def test_a_suspect_that_has_its_place_goes_on_before_one_that_waits() -> None:
    desk = Desk(running=2, prefix_cache=False, chunk_size=2)
    waits, runs = desk.submit(2, 20), desk.submit(4, 20)
    while len(desk.round()) == 1:
        pass
    assert fail(desk) == []
    queues = desk.scheduler.queues
    queues.park(waits, READER)
    assert desk.round() == [runs], "a chunk of its prompt"
    queues.park(runs, READER)
    other = desk.submit(2, 20)
    desk.round()
    assert desk.round() == [other]
    queues.unpark(runs, READER)
    queues.unpark(waits, READER)
    known = runs.known
    while runs.known == known:
        assert desk.round() == [runs]


def test_a_suspect_that_lost_what_it_had_read_goes_on_alone_still() -> None:
    """As one does whose block begins again, with other weights."""
    desk = Desk()
    other, suspect = desk.submit(4, 20), desk.submit(4, 20)
    desk.scheduler.suspects.add(suspect)
    suspect.recovery.failed_at += 1
    assert [desk.round() for _ in range(2)] == [[suspect]] * 2
    assert set(desk.round()) == {other, suspect}
    desk.finish()


def test_one_that_came_further_is_no_suspect_when_it_loses_what_it_had_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would wait for a turn that never comes, and all others behind it."""
    desk, lost = Desk(), 0
    other, once = desk.submit(4, 20), desk.submit(4, 20)
    monkeypatch.setattr(TokenCursor, "progress", property(lambda cursor: cursor.known - lost))
    desk.round()
    assert fail(desk) == []
    while desk.round() != [other, once]:
        pass
    lost = 3
    desk.scheduler.replace_weights(1)
    desk.finish()
