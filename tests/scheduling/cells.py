"""A desk whose model has recurrent state, and what its rows do with the cells."""

from __future__ import annotations

from collections import abc
from typing import Any

from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step import Row
from tests.scheduling.desk import Desk

PAGE = 4


def desk(snapshots: int | None = 4, **options: Any) -> Desk:
    return Desk(snapshots=snapshots, **{"share_prefix_tokens": 0, **options})


def rows(at: Desk) -> list[Row]:
    """Of the newest step."""
    return at.flights[-1].rows


def cell(at: Desk, number: int, request: Sequence | None = None) -> str:
    """What a cell is: "empty", "slot" of the request, or "kept"."""
    if number == 0:
        return "empty"
    if number > at.memory.slots.total:
        return "kept"
    assert request is None or number == request.kv.slot
    return "slot"


def course(at: Desk, request: Sequence, steps: int = 20) -> list[tuple[int, int, str, str]]:
    """Prefill chunks of a request up to the last: start, stop, and the cells that each reads and writes."""
    found = []
    for _ in range(steps):
        if request.cursor.prefilled or request.finished:
            break
        at.plan()
        for row in rows(at):
            if row.sequence is request and row.ids:
                read, write = cell(at, row.state_read, request), cell(at, row.state_write, request)
                found.append((row.start, row.kv_length, read, write))
        at.resolve()
    return found


def bring(at: Desk, token: int, forced: abc.Sequence[int] = ()) -> None:
    """Resolve the oldest step, all of whose sampling rows bring this."""
    at.bring(at.flights.pop(0), token, forced)
