"""The ledger: what this process has taken of the memory, and has promised and not taken yet, by name.

A KV pool takes its memory as its pages are written, and mapped weights count as free although every step
reads them. The system does not know of either: whoever asks it alone promises the same memory twice. Every
part of this process that grows with its models or its requests has a :class:`Share`. What is left for a new
one is what the system has left, without what others were promised and have not taken.
"""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from aioinfer.errors import OutOfMemory
from aioinfer.system.memory import Available, give_back, memory_available

__all__ = ["LEDGER", "ByteCache", "Entry", "Ledger", "Share"]

_GIB = 1 << 30

_KeyT = TypeVar("_KeyT", bound=Hashable)
_ValueT = TypeVar("_ValueT")


@dataclass(frozen=True, slots=True)
class Entry:
    """All shares of one name.

    Attributes:
        promised: bytes that they may take, or have taken.
        taken: bytes of these that are taken.
        bound: bytes that they may have at most; None: what is left when they are claimed.
    """

    promised: int
    taken: int
    bound: int | None


class Share:
    """A part of the memory of this process, in a ledger as long as somebody holds it.

    Attributes:
        promised: bytes that it may take, or has taken.
        bound: the most it may ever promise, where it has a bound of its own.
        key: shares with the same key are the same memory, such as one file that two engines have mapped.
    """

    def __init__(
        self,
        name: str,
        promised: int = 0,
        taken: Callable[[], int] | int = 0,
        *,
        bound: int | None = None,
        key: Hashable = None,
        ledger: Ledger | None = None,
    ) -> None:
        """``taken``: bytes, or what counts them."""
        self.name, self.promised, self.bound, self.key = name, promised, bound, key
        self._taken = taken
        self._ledger = LEDGER if ledger is None else ledger
        self._ledger.add(self)

    @property
    def taken(self) -> int:
        """Bytes that are taken."""
        return self._taken() if callable(self._taken) else self._taken

    @taken.setter
    def taken(self, size: int) -> None:
        self._taken = size

    def take(self, size: int) -> bool:
        """Take ``size`` bytes more, at once; False: that would be beyond the bound, and nothing is taken.
        On any thread."""
        with self._ledger.lock:
            if self.bound is not None and size > self.bound - self.promised:
                return False
            self.promised += size
            self.taken = self.promised
            return True

    def give(self, size: int) -> None:
        """Give back what :meth:`take` has taken."""
        self.take(-size)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._ledger.remove(self)


class Ledger:
    """The shares of a process. On any thread."""

    def __init__(self, available: Callable[[], Available | None] = lambda: None) -> None:
        """``available``: what the system has left; None where it does not say."""
        self.available = available
        #: what is checked while it is held stays true: memory for a pool is checked and made under it
        self.claims = threading.RLock()
        #: held for moments
        self.lock = threading.RLock()
        #: weak: a share that was not closed, because a start has failed, ends with what it stands for
        self._shares: weakref.WeakSet[Share] = weakref.WeakSet()

    def add(self, share: Share) -> None:
        with self.lock:
            self._shares.add(share)

    def remove(self, share: Share) -> None:
        with self.lock:
            self._shares.discard(share)

    def entries(self) -> dict[str, Entry]:
        """Sums by name, in order of the names."""
        with self.lock:
            shares = sorted(self._shares, key=lambda each: each.name)
        found: dict[str, Entry] = {}
        for each in shares:
            so_far = found.get(each.name, Entry(0, 0, None))
            bound = so_far.bound if each.bound is None else (so_far.bound or 0) + each.bound
            found[each.name] = Entry(so_far.promised + each.promised, so_far.taken + each.taken, bound)
        return found

    def untaken(self) -> int:
        """Bytes that were promised and are not taken yet; a share with a bound may come to have all of it.
        Takes a millisecond for each gigabyte of pools."""
        with self.lock:
            shares = list(self._shares)
        once = {each if each.key is None else each.key: each for each in shares}
        return sum(max(0, (each.bound or each.promised) - each.taken) for each in once.values())

    def left(self) -> Available | None:
        """What the system has left, without what was promised and is not taken."""
        available = self.available()
        return available and Available(max(0, available.bytes - self.untaken()), available.source)

    def short(self, size: int) -> Available | None:
        """What is left, if that is less than ``size`` bytes, also without what closed engines and failed
        starts have left behind."""
        left = self.left()
        if left is not None and size > left.bytes:
            gc.collect()
            give_back()
            left = self.left()
        return left if left is not None and size > left.bytes else None

    def said(self, left: Available) -> str:
        """What is left, for a message."""
        untaken = self.untaken()
        text = f"the {left.source} has {left.bytes / _GIB:.2f} GiB left"
        return f"{text} beside {untaken / _GIB:.2f} GiB that this process has promised" if untaken else text

    def claim(self, share: Share, size: int) -> None:
        """Promise ``size`` bytes more to a share. Raises OutOfMemory: they are not left."""
        with self.claims:
            if (left := self.short(size)) is not None:
                raise OutOfMemory(f"{share.name}: {size / _GIB:.2f} GiB are needed, and {self.said(left)}")
            with self.lock:
                share.promised += size


class ByteCache(Generic[_KeyT, _ValueT]):
    """A cache that is bounded in bytes: what was not used for longest goes first. On any thread."""

    def __init__(self, name: str, most: int, *, ledger: Ledger | None = None) -> None:
        """``name``: of its share in the ledger; ``most``: bytes of all values."""
        self._kept: OrderedDict[_KeyT, tuple[_ValueT, int]] = OrderedDict()
        self._most = most
        self._ledger = LEDGER if ledger is None else ledger
        self._share = Share(name, bound=most, ledger=self._ledger)

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, key: _KeyT) -> bool:
        """Whether a value is kept; it does not count as used."""
        return key in self._kept

    @property
    def bytes(self) -> int:
        """Bytes of all values that are kept."""
        return self._share.promised

    def get(self, key: _KeyT) -> _ValueT | None:
        """The value of a key, which counts as used now."""
        with self._ledger.lock:
            if (found := self._kept.get(key)) is None:
                return None
            self._kept.move_to_end(key)
            return found[0]

    def put(self, key: _KeyT, value: _ValueT, size: int) -> None:
        """Keep a value of ``size`` bytes, in place of an earlier one of its key. One that is larger than the
        bound is not kept."""
        gone: list[tuple[_ValueT, int] | None] = []  # what they run when they go does not run under the lock
        with self._ledger.lock:
            gone.append(self._drop(key))
            if size > self._most:
                return
            while not self._share.take(size):
                gone.append(self._drop(next(iter(self._kept))))
            self._kept[key] = value, size

    def forget(self, key: _KeyT) -> None:
        """Keep a value no longer."""
        with self._ledger.lock:
            gone = self._drop(key)
        del gone

    def clear(self) -> None:
        """Forget all."""
        with self._ledger.lock:
            kept, self._kept = self._kept, OrderedDict()
            self._share.give(self.bytes)
        del kept

    def _drop(self, key: _KeyT) -> tuple[_ValueT, int] | None:
        if (found := self._kept.pop(key, None)) is not None:
            self._share.give(found[1])
        return found


LEDGER = Ledger(memory_available)


def _forked() -> None:
    """In a child, the pools of its parent's engines are nobody's, and its other threads are gone."""
    LEDGER.claims, LEDGER.lock = threading.RLock(), threading.RLock()
    for share in [*LEDGER._shares]:
        if share.bound is None:
            LEDGER.remove(share)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=lambda: LEDGER.lock.acquire(),
        after_in_parent=lambda: LEDGER.lock.release(),
        after_in_child=_forked,
    )
