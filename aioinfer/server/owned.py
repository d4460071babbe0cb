"""Owned: what a server keeps for its keys between requests, by id: conversations, and nothing for ever."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from aioinfer.ledger import Share

__all__ = ["Owned"]

_ValueT = TypeVar("_ValueT")
#: seconds between two looks for what has expired, at least
_LOOK = 1.0
#: entries of the heap that may be out of date
_STALE = 64


class _Item(Generic[_ValueT]):
    """One value. It is forgotten ``ttl`` seconds after its last use, at ``expires``."""

    __slots__ = ("expires", "size", "ttl", "value")

    def __init__(self, value: _ValueT, size: int, ttl: float, now: float) -> None:
        self.value = value
        self.size = size
        self.ttl = ttl
        self.expires = now + ttl


class Owned(Generic[_ValueT]):
    """Values of owners, by ids that only their owners find.

    Each owner has ``most`` of them, and all together the bytes of ``share``: what was used longest ago goes
    first, of the owner who has too many, or the most bytes. On the event loop, but for :meth:`find`.
    """

    def __init__(
        self,
        most: int,
        *,
        share: Share | None = None,
        forget: Callable[[_ValueT], None] | None = None,
        in_use: Callable[[_ValueT], bool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``forget`` is called with every value that goes, however it goes; it does not raise. What is
        ``in_use`` does not expire."""
        self.most = most
        self._share = share
        self._forget = forget
        self._in_use = in_use
        self._clock = clock
        self._items: dict[tuple[str, str], _Item[_ValueT]] = {}
        #: ids of each owner, that used longest ago comes first
        self._owned: dict[str, OrderedDict[str, None]] = {}
        self._bytes: dict[str, int] = {}
        #: when an item may expire, and its key; one that was used expires later
        self._due: list[tuple[float, tuple[str, str]]] = []
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._items)

    def find(self, owner: str, name: str) -> _ValueT | None:
        """The value of an id; None if there is none, or it is another owner's. On any thread."""
        item = self._items.get((owner, name))
        return None if item is None or self._expired(item, self._clock()) else item.value

    def of(self, owner: str) -> list[_ValueT]:
        """The values of an owner, that used last comes last."""
        self._expire()
        return [self._items[owner, name].value for name in self._owned.get(owner, ())]

    def left(self, owner: str, name: str) -> float:
        """Seconds until a value is forgotten, if it is not used."""
        item = self._items.get((owner, name))
        return 0.0 if item is None else max(0.0, item.expires - self._clock())

    def add(self, owner: str, name: str, value: _ValueT, *, ttl: float, size: int = 0) -> bool:
        """Keep a value; another one of this id goes. Returns False if there is no room for its bytes."""
        self.remove(owner, name)
        self._expire()
        if not self._make_room(owner, size):
            return False
        item = self._items[owner, name] = _Item(value, size, ttl, self._clock())
        self._owned.setdefault(owner, OrderedDict())[name] = None
        self._bytes[owner] = self._bytes.get(owner, 0) + size
        heapq.heappush(self._due, (item.expires, (owner, name)))
        if len(self._due) > 2 * len(self._items) + _STALE:
            self._due = [(each.expires, key) for key, each in self._items.items()]
            heapq.heapify(self._due)
        self._set_timer()
        return True

    def use(self, owner: str, name: str) -> None:
        """A value was used; nothing happens if it is gone."""
        if self.find(owner, name) is not None:
            item = self._items[owner, name]
            item.expires = self._clock() + item.ttl
            self._owned[owner].move_to_end(name)

    def remove(self, owner: str, name: str) -> bool:
        """Forget a value; False if :meth:`find` does not find it."""
        found = self.find(owner, name) is not None
        if (owner, name) in self._items:
            self._drop((owner, name))
        return found

    def clear(self) -> None:
        """Forget everything, and look no more for what has expired."""
        for key in [*self._items]:
            self._drop(key)
        self._due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # -- limits ---------------------------------------------------------------------------------

    def _make_room(self, owner: str, size: int) -> bool:
        """Room for one more value of an owner, and for its bytes, which are taken."""
        owned = self._owned.get(owner, ())
        if len(owned) >= self.most:
            if not owned:
                return False
            self._drop((owner, next(iter(owned))))
        if (share := self._share) is None:
            return True
        if share.bound is not None and size > share.bound - share.promised + sum(self._bytes.values()):
            return False  # nobody loses anything for what has no room anyway
        while not share.take(size):
            if not self._bytes:
                return False
            largest = max(self._bytes, key=self._bytes.__getitem__)
            self._drop((largest, next(iter(self._owned[largest]))))
        return True

    def _expired(self, item: _Item[_ValueT], now: float) -> bool:
        return item.expires <= now and not (self._in_use is not None and self._in_use(item.value))

    def _expire(self) -> None:
        now, due = self._clock(), self._due
        while due and due[0][0] <= now:
            _, key = heapq.heappop(due)
            item = self._items.get(key)
            if item is None:
                continue
            if self._expired(item, now):
                self._drop(key)
            else:
                heapq.heappush(due, (item.expires if item.expires > now else now + _LOOK, key))

    def _set_timer(self) -> None:
        if self._timer is None and self._due:
            seconds = max(_LOOK, self._due[0][0] - self._clock())
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        self._expire()
        self._set_timer()

    def _drop(self, key: tuple[str, str]) -> None:
        owner, name = key
        item = self._items.pop(key)
        owned = self._owned[owner]
        del owned[name]
        self._bytes[owner] -= item.size
        if self._share is not None:
            self._share.give(item.size)
        if not owned:
            del self._owned[owner], self._bytes[owner]
        if self._forget is not None:
            self._forget(item.value)
