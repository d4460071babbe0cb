"""Holds: prefixes that replicas hold for the sessions of their dispatcher, and how both ends know them."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from aioinfer.cache.namespace import Namespace
from aioinfer.cache.radix import token_key
from aioinfer.errors import EngineError
from aioinfer.loop.holding import Prefix
from aioinfer.parallel import messages
from aioinfer.parallel.frames import FrameError
from aioinfer.parallel.prefixes import take_away
from aioinfer.parallel.replica import Replica, ReplicaState

if TYPE_CHECKING:
    from aioinfer.engine import Engine
    from aioinfer.loop.holding import Kept

__all__ = ["Holds", "Homed", "RemoteHold", "RemoteHolds", "hold", "warm"]


def hold(engine: Engine, prefix: Prefix, seconds: float | None) -> Kept | None:
    """Hold what an engine has cached of a prefix. None: nothing, or its adapter is not loaded."""
    runtime = engine._started()
    core, uid = runtime.core, 0
    if prefix.adapter is not None:
        if prefix.adapter not in core.adapters.loaded:
            return None
        uid = core.adapters.find(prefix.adapter).uid
    namespace = Namespace(prefix.cache_salt, uid, core.weight_version)
    return runtime.holding.hold(token_key(prefix.ids), namespace, seconds)


async def warm(engine: Engine, prefix: Prefix, seconds: float | None) -> Kept | None:
    """The same, once it has computed what is missing. Raises as :meth:`aioinfer.Engine.warm`."""
    ids, salt, adapter = prefix
    async with await engine.warm(ids, cache_salt=salt, adapter=adapter):
        return hold(engine, prefix, seconds)


_SERVING = (ReplicaState.READY, ReplicaState.DRAINING)


class Homed:
    """A hold in a replica, to which what begins with it rather goes."""

    __slots__ = ("_kept", "_pages", "_replica")

    def __init__(self, kept: Kept, replica: Replica, pages: Sequence[int]) -> None:
        """``pages``: hashes of its prefixes."""
        self._kept = kept
        self._replica = replica
        self._pages = pages[-1:]
        replica.held.update(self._pages)

    @property
    def held_tokens(self) -> int:
        return self._kept.held_tokens if self._replica.state in _SERVING else 0

    def again(self) -> Homed | None:
        kept = self._kept.again()
        return None if kept is None else Homed(kept, self._replica, self._pages)

    def touch(self) -> None:
        self._kept.touch()

    def release(self) -> None:
        take_away(self._replica.held, self._pages)
        self._pages = ()
        self._kept.release()


# -- at the dispatcher ---------------------------------------------------------------------------------


class RemoteHold:
    """A hold in another process, as :class:`~aioinfer.loop.holding.Kept`."""

    __slots__ = ("_holds", "held_tokens", "number")

    def __init__(self, holds: RemoteHolds, number: int) -> None:
        self._holds = holds
        self.number = number
        #: as it has told last, which is a quarter of a second old at most
        self.held_tokens = 0

    def again(self) -> RemoteHold:
        return self._holds.new(lambda number: messages.Hold(number, of=self.number))

    def touch(self) -> None:
        self._holds.tell(messages.Use(self.number))

    def release(self) -> None:
        self._holds.release(self)


class RemoteHolds:
    """Those of one connection; when it ends, nothing is held."""

    def __init__(self, send: Callable[[messages.Message], None], numbers: Iterator[int]) -> None:
        self._send = send
        self._numbers = numbers
        self._held: dict[int, RemoteHold] = {}

    def new(self, order: Callable[[int], messages.Hold]) -> RemoteHold:
        """Have something held, by an order with this number."""
        number = next(self._numbers)
        self._send(order(number))
        return self._add(number)

    def made(self, answer: messages.Held) -> RemoteHold:
        """What is held now by this answer."""
        found = self._add(answer.number)
        found.held_tokens = answer.tokens
        return found

    def _add(self, number: int) -> RemoteHold:
        found = self._held[number] = RemoteHold(self, number)
        return found

    def held(self, message: messages.Held) -> None:
        """Note what is held."""
        found = self._held.get(message.number)
        if found is not None:
            found.held_tokens = message.tokens

    def tell(self, order: messages.Use | messages.Release) -> None:
        """Send an order about what is held still."""
        if order.number in self._held:
            self._send(order)

    def release(self, held: RemoteHold) -> None:
        """Idempotent."""
        held.held_tokens = 0
        self.tell(messages.Release(held.number))
        self._held.pop(held.number, None)

    def close(self) -> None:
        """The connection has ended."""
        for held in self._held.values():
            held.held_tokens = 0
        self._held.clear()


# -- at the replica ------------------------------------------------------------------------------------


class Holds:
    """What one connection has held, by its numbers."""

    def __init__(self, engine: Engine, send: Callable[[messages.Message], None]) -> None:
        self._engine = engine
        self._send = send
        self._held: dict[int, Kept | None] = {}
        self._told: dict[int, int] = {}
        self._warming: dict[int, asyncio.Task[Kept | None]] = {}

    def hold(self, order: messages.Hold) -> None:
        """As the message says. Raises FrameError."""
        if order.number in self._held or order.number in self._warming:
            raise FrameError(f"hold {order.number} is there already")
        if order.compute:
            warming = warm(self._engine, _prefix(order), order.seconds)
            task = asyncio.get_running_loop().create_task(warming, name="aioinfer-warming")
            self._warming[order.number] = task
            task.add_done_callback(functools.partial(self._warmed, order.number))
            return
        if order.of:
            first = self._held.get(order.of)
            kept = None if first is None else first.again()
        else:
            kept = hold(self._engine, _prefix(order), order.seconds) if self._engine.ready else None
        self._add(order.number, kept)

    def _warmed(self, number: int, task: asyncio.Task[Kept | None]) -> None:
        wanted = self._warming.pop(number, None) is not None
        error = None if task.cancelled() else task.exception()
        kept = None if task.cancelled() or error is not None else task.result()
        if wanted and error is None:
            self._add(number, kept)
            return
        if kept is not None:
            kept.release()
        self._send(messages.Held(number, error=error or EngineError("the warming was cancelled")))

    def _add(self, number: int, kept: Kept | None) -> None:
        tokens = 0 if kept is None else kept.held_tokens
        self._held[number], self._told[number] = kept, tokens
        self._send(messages.Held(number, tokens))

    def use(self, number: int) -> None:
        """As the message says."""
        if (kept := self._held.get(number)) is not None:
            kept.touch()

    def release(self, number: int) -> None:
        """As the message says; what is still computed for it is given up."""
        if (warming := self._warming.pop(number, None)) is not None:
            warming.cancel()
        kept = self._held.pop(number, None)
        self._told.pop(number, None)
        if kept is not None:
            kept.release()

    def report(self) -> None:
        """Tell of what has changed."""
        for number, kept in self._held.items():
            tokens = 0 if kept is None else kept.held_tokens
            if tokens != self._told[number]:
                self._told[number] = tokens
                self._send(messages.Held(number, tokens))

    def close(self) -> None:
        """The connection has ended."""
        for number in [*self._held, *self._warming]:
            self.release(number)


def _prefix(order: messages.Hold) -> Prefix:
    return Prefix(order.ids, order.cache_salt, order.adapter)
