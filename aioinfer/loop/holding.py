"""What sessions and warmed prefixes have in an engine: a place among the sessions, a hold for a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from aioinfer.errors import InvalidRequest, Rejected

if TYPE_CHECKING:
    import asyncio

    from aioinfer.cache.nodes import Hold
    from aioinfer.cells import StreamCell
    from aioinfer.scheduling.memory import Memory
    from aioinfer.tiers.store import PageStore

__all__ = ["Held", "Holding", "Keeping", "Kept", "Prefix", "Seat", "Seats"]

_TOKEN_BYTES = 4


class Prefix(NamedTuple):
    """Tokens, and whose KV of these it is."""

    ids: list[int]
    cache_salt: str
    adapter: str | None


class Kept(Protocol):
    """A prefix that is held somewhere. On the loop of what holds it."""

    @property
    def held_tokens(self) -> int:
        """Tokens of it whose KV is there still."""

    def again(self) -> Kept | None:
        """Another hold on the same, with a time of its own; None if nothing is left. Copies nothing."""

    def touch(self) -> None:
        """It is used: its time begins anew."""

    def release(self) -> None:
        """Hold it no longer. Idempotent."""


class Held:
    """A hold in this engine's prefix cache, which ends after its time."""

    __slots__ = ("_hold", "_holding", "_seconds", "_timer", "seen")

    def __init__(self, holding: Holding, hold: Hold, seconds: float | None) -> None:
        self._holding = holding
        self._hold = hold
        self._seconds = seconds
        self._timer: asyncio.TimerHandle | None = None
        #: when the prefix was last used, as far as was looked at
        self.seen = hold.stamp
        self.touch()

    @property
    def stamp(self) -> int:
        """Logical time of the last use of the whole prefix."""
        return self._hold.stamp

    @property
    def held_tokens(self) -> int:
        return self._hold.num_pages * self._holding.memory.pages.page_size

    def again(self) -> Held | None:
        return self._holding.again(self._hold, self._seconds)

    def touch(self) -> None:
        self._cancel()
        if self._seconds is not None and self._hold.node is not None:
            self._timer = self._holding.loop.call_later(self._seconds, self._holding.expire, self)

    def release(self) -> None:
        self._cancel()
        self._holding.forget(self, self._hold)

    def _cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Holding:
    """The holds of one engine: for a time each, and together on a share of its pages at most."""

    def __init__(self, memory: Memory, loop: asyncio.AbstractEventLoop, share: float) -> None:
        """``share``: of the pool, at most. The holds on what was not used for longest end for others."""
        self.memory = memory
        self.loop = loop
        self._most = int(share * memory.pages.total)
        #: those whose use was looked at longest ago come first
        self._held: dict[Held, None] = {}
        #: holds that ended because they were not used for their time, or for others
        self.expired = 0

    def hold(self, key: bytes, namespace: Hashable, seconds: float | None) -> Held | None:
        """Hold what is cached of a prefix, as far as may be held, until it was not used for ``seconds``.
        None: that is nothing."""
        most = self._most * self.memory.pages.page_size * _TOKEN_BYTES
        return self._add(self.memory.hold(key[:most], namespace), seconds)

    def again(self, hold: Hold, seconds: float | None) -> Held | None:
        """Another hold on the same prefix."""
        return self._add(self.memory.hold_again(hold), seconds)

    def _add(self, hold: Hold | None, seconds: float | None) -> Held | None:
        if hold is None or hold.node is None:
            return None
        held = Held(self, hold, seconds)
        self._held[held] = None
        while self.memory.held_pages > self._most:
            eldest = next(iter(self._held))
            if eldest.stamp > eldest.seen:
                # It was used since: it goes to the end.
                eldest.seen = eldest.stamp
                self._held[eldest] = self._held.pop(eldest)
            else:
                self.expire(eldest)
        return held

    def expire(self, held: Held) -> None:
        """A hold ends before it is released."""
        self.expired += 1
        held.release()

    def forget(self, held: Held, hold: Hold) -> None:
        """A hold has ended."""
        self._held.pop(held, None)
        self.memory.release_hold(hold)

    def close(self) -> None:
        """End all of them."""
        for held in list(self._held):
            held.release()


class Keeping:
    """What an engine or a dispatcher does for sessions and warmed prefixes; here, nothing."""

    def keep(self, cell: StreamCell, seconds: float | None) -> Kept | None:
        """Hold the KV of an open request that ends now, until it was unused for so long. None: nothing."""
        return None

    async def store(
        self, ids: Sequence[int], cache_salt: str, adapter: str | None, into: PageStore | None = None
    ) -> int:
        """Put what is cached of a prefix into a store, by default the engine's own; returns how many of the
        tokens are there then. None of them: there is nothing to copy from here. Raises InvalidRequest."""
        return 0

    def attach(self, store: PageStore) -> bool:
        """Have requests look for their pages in a store, too, until :meth:`detach`. False: they cannot."""
        return False

    def detach(self, store: PageStore) -> None:
        """Do not look there any more."""

    async def move(self, prefix: Prefix, replica: str, seconds: float | None) -> Kept | None:
        """Have the KV of a prefix held in a replica. Raises InvalidRequest."""
        raise InvalidRequest("replica", "this is one engine: sessions move between those of a dispatcher")


class Seat:
    """The place of an open session in its engine, with what is held for it."""

    __slots__ = ("_seats", "kept")

    def __init__(self, seats: Seats) -> None:
        self._seats: Seats | None = seats
        self.kept: Kept | None = None

    @property
    def left(self) -> bool:
        """The session was closed, or its engine was."""
        return self._seats is None

    def hold(self, kept: Kept | None) -> None:
        """Hold this in place of what was held."""
        before, self.kept = self.kept, kept
        if before is not None:
            before.release()

    def leave(self) -> None:
        """Idempotent."""
        self.hold(None)
        seats, self._seats = self._seats, None
        if seats is not None:
            seats.taken.discard(self)


class Seats:
    """The places of all open sessions."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.taken: set[Seat] = set()

    def take(self) -> Seat:
        """Raises Rejected: all are taken."""
        if len(self.taken) >= self._most:
            raise Rejected(f"{len(self.taken)} sessions are open already (max_sessions)")
        seat = Seat(self)
        self.taken.add(seat)
        return seat

    def close(self) -> None:
        """End all sessions."""
        for seat in list(self.taken):
            seat.leave()
