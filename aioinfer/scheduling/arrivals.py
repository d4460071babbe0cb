"""Arrivals and departures: pages that are filled, or read, by something else than a step.

An admitted request may find that a store has the KV of its next pages. These are read into the pages that it
got at its admission, and only then its prefill begins, behind them::

    request   |-- cached --|-- arriving --|-- to compute --|
                            a worker fills them

What is being filled is never handed out: if the request ends or is retracted meanwhile, its arrival keeps
these pages until the worker has stopped. A departure is a lock on a cached prefix that a worker copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioinfer.cache.nodes import Snapshot
    from aioinfer.cache.radix import Lock

__all__ = ["Arrival", "Departure", "Transfers"]


class Arrival:
    """Pages of one admitted request that a worker fills. The worker reads ``abandoned`` and counts
    ``filled``, nothing else changes while it works."""

    __slots__ = ("abandoned", "filled", "key", "names", "pages", "slot")

    def __init__(self, key: int, names: Sequence[bytes], pages: Sequence[int], slot: int = 0) -> None:
        """``names`` of ``pages``, which follow the cached ones of the request ``key``. ``slot``: in its cell
        the recurrent state after the last of them arrives as well; 0: there is none."""
        self.key = key
        self.names = names
        self.pages = pages
        self.slot = slot
        #: of the pages, so far
        self.filled = 0
        #: the request has left it, and with it these pages, and the slot if its cell is filled
        self.abandoned = False


class Departure:
    """A locked prefix that a worker reads, and the recurrent state at its end, if that is kept."""

    __slots__ = ("lock", "snapshot")

    def __init__(self, lock: Lock, snapshot: Snapshot | None) -> None:
        self.lock = lock
        self.snapshot = snapshot


class Transfers:
    """The arrivals that were abandoned, the departures, and what has arrived. A part of
    :class:`~aioinfer.scheduling.memory.Memory`."""

    __slots__ = ("abandoned", "arrived", "departures", "failed", "hung", "stored")

    def __init__(self) -> None:
        self.abandoned: set[Arrival] = set()
        self.departures: set[Departure] = set()
        #: a worker takes so long that nothing should wait for it: a disk may hang
        self.hung = False
        #: pages that have arrived, pages that should have and did not, and pages that were stored
        self.arrived, self.failed, self.stored = 0, 0, 0

    @property
    def pages(self) -> int:
        """Pages that belong to no request, because they are being filled."""
        return sum(len(each.pages) for each in self.abandoned)

    @property
    def slots(self) -> int:
        """The same of slots."""
        return sum(each.slot > 0 for each in self.abandoned)

    def __bool__(self) -> bool:
        return bool(self.abandoned or self.departures)

    def abandon(self, arrival: Arrival) -> int:
        """The request of an arrival leaves it; returns how many of its pages the arrival keeps."""
        arrival.abandoned = True
        self.abandoned.add(arrival)
        return len(arrival.pages)
