"""RecordQueue: the requests of a dispatcher that wait for a replica."""

from __future__ import annotations

from sortedcontainers import SortedDict

from aioinfer.parallel.record import Record

__all__ = ["RecordQueue"]


class RecordQueue:
    """In the order of arrival, or of priorities; outputs that have begun go first."""

    __slots__ = ("_aside", "_ranked", "_records", "tokens")

    def __init__(self, *, ranked: bool) -> None:
        """``ranked``: larger priorities go first."""
        self._ranked = ranked
        self._records: SortedDict = SortedDict()
        #: those that no replica may compute at present
        self._aside: dict[Record, None] = {}
        #: of the prompts and outputs that wait
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._records) + len(self._aside)

    @property
    def first(self) -> Record | None:
        """The request that goes next."""
        record: Record | None = self._records.peekitem(0)[1] if self._records else None
        return record

    def add(self, record: Record) -> None:
        """Have a record wait for a replica, perhaps again."""
        rank = -record.request.priority if self._ranked else 0
        record.queued = (record.output.admitted_at is None, rank, *record.place)
        self._records[record.queued] = record
        self.tokens += record.known

    def set_aside(self, record: Record) -> None:
        """Have it wait until :meth:`take_back`, without holding up the others."""
        del self._records[record.queued]
        self._aside[record] = None

    def take_back(self) -> None:
        """Put all that were set aside in their places again."""
        for record in self._aside:
            self._records[record.queued] = record
        self._aside.clear()

    def remove(self, record: Record) -> None:
        """Remove one that was sent or has ended. Idempotent."""
        if record.queued is not None:
            if record in self._aside:
                del self._aside[record]
            else:
                del self._records[record.queued]
            self.tokens -= record.known
            record.queued = None
