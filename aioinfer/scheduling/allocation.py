"""Allocation: the memory that one sequence holds, from its admission to its release."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from aioinfer.cache.nodes import Snapshot
from aioinfer.cache.radix import Lock

if TYPE_CHECKING:
    from aioinfer.scheduling.arrivals import Arrival

__all__ = ["Allocation", "StateSnapshots"]

_NO_PARTINGS: Mapping[int, int] = MappingProxyType({})


class StateSnapshots:
    """The snapshots of recurrent state that a running sequence holds."""

    __slots__ = ("source", "taken", "wanted")

    def __init__(self) -> None:
        #: its next row starts from it; None: from the slot's cell, or from nothing at position 0
        self.source: Snapshot | None = None
        #: written by launched chunks that have not resolved, oldest first
        self.taken: list[Snapshot] = []
        #: positions that are still to be reached at which a snapshot is to be taken
        self.wanted: set[int] = set()

    def private(self) -> set[Snapshot]:
        """The snapshots that the tree does not carry."""
        held = self.taken if self.source is None else [*self.taken, self.source]
        return {snapshot for snapshot in held if snapshot.node is None}


class Allocation:
    """The slot and the pages of a sequence. Managed by :class:`~aioinfer.scheduling.memory.Memory`::

    |-- cached pages ----|-- private pages --|
    """

    __slots__ = (
        "announced",
        "arrival",
        "cacheable",
        "cached_pages",
        "hit",
        "last_step",
        "lock",
        "names",
        "pages",
        "partings",
        "sent_pages",
        "slot",
        "states",
    )

    def __init__(self) -> None:
        self.slot = 0
        self.pages: list[int] = []
        #: how many of ``pages`` belong to the prefix cache, where ``lock`` holds them
        self.cached_pages = 0
        self.lock: Lock | None = None
        #: the KV may be offered to other requests
        self.cacheable = True
        #: result of the last lookup in the cache; kept by Memory
        self.hit: tuple[int, int, int, object] = (-1, 0, 0, None)
        #: fills pages of it, until when nothing is computed; None: nothing does
        self.arrival: Arrival | None = None
        #: of its pages, as far as something wanted them: see :mod:`aioinfer.cache.names`
        self.names: list[bytes] = []
        #: the device side knows the request's parameters
        self.announced = False
        #: how many of ``pages`` the device side knows
        self.sent_pages = 0
        #: the newest launched step with a row of this request; kept by the batch while the request is in it
        self.last_step = 0
        #: while it runs, if the model has recurrent state
        self.states: StateSnapshots | None = None
        #: by the keys of requests that wait for its prefix, where they part from it; kept by StateCells
        self.partings: Mapping[int, int] = _NO_PARTINGS

    def forget_device(self) -> None:
        """Have the next row announce the request and all its pages again."""
        self.announced = False
        self.sent_pages = 0

    def take_new_pages(self) -> tuple[int, list[int]]:
        """Index of the first page that the device side does not know yet, and these pages; they are sent
        now."""
        first = self.sent_pages
        self.sent_pages = len(self.pages)
        return first, self.pages[first:]
