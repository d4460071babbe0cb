"""RecordQueue: the requests of a dispatcher that wait for a replica."""

from __future__ import annotations

from collections.abc import Container

from sortedcontainers import SortedDict

from aioinfer.parallel.record import Record
from aioinfer.parallel.roles import Role

__all__ = ["RecordQueue"]


class RecordQueue:
    """In the order of arrival, or of priorities; outputs that have begun go first. What waits for replicas of
    one role does not wait for others."""

    __slots__ = ("_aside", "_lanes", "_ranked", "tokens")

    def __init__(self, *, ranked: bool) -> None:
        """``ranked``: larger priorities go first."""
        self._ranked = ranked
        #: by the role of the replicas that it is for
        self._lanes: dict[Role, SortedDict] = {"prefill": SortedDict(), "decode": SortedDict()}
        #: those that no replica may compute at present
        self._aside: dict[Record, None] = {}
        #: of the prompts and outputs that wait
        self.tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values())) + len(self._aside)

    def first(self, full: Container[Role] = ()) -> Record | None:
        """The request that goes next, of those whose replicas are not ``full``."""
        heads: list[Record] = [
            lane.peekitem(0)[1] for role, lane in self._lanes.items() if lane and role not in full
        ]
        return min(heads, key=lambda record: record.queued or (), default=None)

    def add(self, record: Record) -> None:
        """Have a record wait for a replica, perhaps again."""
        rank = -record.request.priority if self._ranked else 0
        record.queued = (record.output.admitted_at is None, rank, *record.place)
        self._lanes[record.lane][record.queued] = record
        self.tokens += record.known

    def set_aside(self, record: Record) -> None:
        """Have it wait until :meth:`take_back`, without holding up the others."""
        del self._lanes[record.lane][record.queued]
        self._aside[record] = None

    def take_back(self) -> None:
        """Put all that were set aside in their places again."""
        for record in self._aside:
            self._lanes[record.lane][record.queued] = record
        self._aside.clear()

    def remove(self, record: Record) -> None:
        """Remove one that was sent or has ended. Idempotent."""
        if record.queued is not None:
            if record in self._aside:
                del self._aside[record]
            else:
                del self._lanes[record.lane][record.queued]
            self.tokens -= record.known
            record.queued = None
