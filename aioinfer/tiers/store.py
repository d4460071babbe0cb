"""PageStore: where pages of KV are kept under their names, outside the device that computed them.

A name stands for the content (:mod:`aioinfer.cache.names`), so a page under a name is right or it is not
there. A store may lose any page at any time; who asked then computes it. For that reason no disk, no other
process and no damaged file makes an error here: a page that cannot be read is a miss, and one that cannot be
kept is refused. Both are counted by reason.
"""

from __future__ import annotations

import errno
import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

__all__ = ["BaseStore", "PageStore", "StoreCounts", "Views"]

_log = logging.getLogger("aioinfer")

#: The bytes of one page, or of one recurrent state, in host memory: pieces in a fixed order, each of format
#: "B" with one dimension. They are written to by ``read``, and read by ``put``.
Views = Sequence[memoryview]

#: what is not logged: it happens in the life of every store
_USUAL = frozenset({"absent", "closed", "paused", "vanished"})
_PAGE, _STATE = b"p", b"s"


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """What a store holds, and has done since it was opened.

    Attributes:
        records, bytes: pages and states that it holds, as far as it knows, and their size.
        pages_read, bytes_read: pages that were found, whole and right, and bytes with those of states.
        pages_written, bytes_written: the same of those that were written, which were not there before.
        evicted: pages and states that were removed to keep the bound.
        misses: pages and states that were asked for and not read, by reason: "absent", "vanished" (another
            process has removed it), "damaged", "size", "version", "owner", "closed", or the name of an error
            of the system ("EIO").
        refused: pages and states that were not kept, by reason: "too large", "full", "paused" (skipped after
            failures), "closed", or the name of an error of the system ("ENOSPC").
    """

    records: int
    bytes: int
    pages_read: int
    bytes_read: int
    pages_written: int
    bytes_written: int
    evicted: int
    misses: Mapping[str, int]
    refused: Mapping[str, int]


class PageStore(Protocol):
    """Pages by name. All methods can be called on any thread, and none raises for what a disk does.

    A page may have a recurrent state with it, that of the position behind it: models with layers of a fixed
    state can continue only behind such a page.
    """

    def leading(self, names: Sequence[bytes], *, states: bool = False) -> int:
        """How many of the first of these pages it probably has. O(names), in memory: no blocking call.

        Args:
            states: count only up to the last of them that has its state.
        """

    def has(self, name: bytes) -> bool:
        """Whether it probably has a page. No blocking call."""

    def has_state(self, name: bytes) -> bool:
        """Whether it probably has a page and its state. No blocking call."""

    def read(
        self, names: Sequence[bytes], pages: Sequence[Views], states: Sequence[Views | None] = ()
    ) -> int:
        """Fill pages in order; how many of the first were there, whole and right. May block.

        The content of the others is junk. A page that :meth:`leading` does not know of may be found.

        Args:
            states: for each page, where its state goes; None: not wanted. A state that is wanted and missing
                makes its page missing. Empty: none is wanted.
        """

    def put(self, name: bytes, page: Views, state: Views | None = None) -> bool:
        """Keep a page, and its state; False: not both are there now. May block.

        What is there already is not written again: it has the same content, and counts as used now.
        """

    def forget(self, names: Sequence[bytes]) -> None:
        """Have these pages no longer: their content was found to be wrong. May block."""

    def refresh(self, names: Sequence[bytes] | None = None, *, states: bool = False) -> None:
        """Learn what other processes have written and removed. May block.

        Args:
            names: look for the first of these alone, up to one that is missing: about 10 us each;
                None: for everything, to be called at intervals.
            states: look for the states of these, too.
        """

    def counts(self) -> StoreCounts:
        """What it holds and has done. No blocking call."""

    def close(self) -> None:
        """End it: from now on every read is a miss and every put is refused. Idempotent."""


class BaseStore(ABC):
    """What stores have in common: pages and states are records under keys, a name and a kind."""

    def __init__(self, label: str) -> None:
        """``label``: of the store, in the log."""
        self._label = label
        #: held for moments, never over a call that may block
        self._lock = threading.Lock()
        self._closed = False
        self._said: set[tuple[str, str]] = set()
        self._misses, self._refused = Counter[str](), Counter[str]()
        self._pages_read = self._bytes_read = self._pages_written = self._bytes_written = self._evicted = 0

    # -- for subclasses: a key is a name and a kind -------------------------------------------------------

    @abstractmethod
    def _has(self, key: bytes) -> bool:
        """Whether a record is there, as far as is known without a blocking call."""

    @abstractmethod
    def _read(self, key: bytes, views: Views) -> str:
        """Fill the views; why that could not be done, "" if it was."""

    @abstractmethod
    def _put(self, key: bytes, views: Views) -> str:
        """Keep a record; why that could not be done, "" if it is there."""

    @abstractmethod
    def _forget(self, key: bytes) -> None:
        """Have a record no longer."""

    @abstractmethod
    def _held(self) -> tuple[int, int]:
        """Records that are held, and their bytes."""

    # -- PageStore ----------------------------------------------------------------------------------------

    def leading(self, names: Sequence[bytes], *, states: bool = False) -> int:
        count = 0
        for at, name in enumerate(names, 1):
            if not self._has(name + _PAGE):
                break
            if not states or self._has(name + _STATE):
                count = at
        return count

    def has(self, name: bytes) -> bool:
        return self._has(name + _PAGE)

    def has_state(self, name: bytes) -> bool:
        return self._has(name + _PAGE) and self._has(name + _STATE)

    def read(
        self, names: Sequence[bytes], pages: Sequence[Views], states: Sequence[Views | None] = ()
    ) -> int:
        count = size = 0
        fault = ""
        for at, (name, page) in enumerate(zip(names, pages, strict=True)):
            state = states[at] if states else None
            fault = self._fault(self._read, name + _PAGE, page)
            if not fault and state is not None:
                fault = self._fault(self._read, name + _STATE, state)
            if fault:
                break
            count += 1
            size += size_of(page) + (0 if state is None else size_of(state))
        with self._lock:
            self._pages_read += count
            self._bytes_read += size
            if fault:
                self._misses[fault] += 1
        self._say(fault, "a page is computed again")
        return count

    def put(self, name: bytes, page: Views, state: Views | None = None) -> bool:
        fault = self._fault(self._put, name + _PAGE, page)
        if not fault and state is not None:
            fault = self._fault(self._put, name + _STATE, state)
        if fault:
            with self._lock:
                self._refused[fault] += 1
            self._say(fault, "a page is not kept")
        return not fault

    def forget(self, names: Sequence[bytes]) -> None:
        for name in names:
            for key in (name + _PAGE, name + _STATE):
                if not self._closed:
                    with suppress(OSError):
                        self._forget(key)

    def refresh(self, names: Sequence[bytes] | None = None, *, states: bool = False) -> None:
        """Does nothing: no other process writes here."""
        return

    def counts(self) -> StoreCounts:
        records, held = self._held()
        with self._lock:
            return StoreCounts(
                records,
                held,
                self._pages_read,
                self._bytes_read,
                self._pages_written,
                self._bytes_written,
                self._evicted,
                dict(self._misses),
                dict(self._refused),
            )

    def close(self) -> None:
        self._closed = True

    # -- parts --------------------------------------------------------------------------------------------

    def _fault(self, call: Callable[[bytes, Views], str], key: bytes, views: Views) -> str:
        if self._closed:
            return "closed"
        try:
            return call(key, views)
        except (OSError, MemoryError) as error:
            code = getattr(error, "errno", None)
            return errno.errorcode.get(code or 0, type(error).__name__)

    def _wrote(self, key: bytes, size: int) -> None:
        with self._lock:
            self._pages_written += is_page(key)
            self._bytes_written += size

    def _say(self, fault: str, effect: str) -> None:
        """Log a reason, the first time."""
        if not fault or fault in _USUAL:
            return
        with self._lock:
            said = (fault, effect) in self._said
            self._said.add((fault, effect))
        if not said:
            _log.warning("%s: %s (%s); further cases are counted only", self._label, effect, fault)


def is_page(key: bytes) -> bool:
    """Whether a key is that of a page; of a state else."""
    return key.endswith(_PAGE)


def size_of(views: Views) -> int:
    """Bytes of all pieces."""
    return sum(map(len, views))
