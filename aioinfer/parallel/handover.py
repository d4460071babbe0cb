"""Handovers: streams that leave the replica that has computed their prompts.

::

    prefill replica   prompt ── first token ── stop ── store pages
                                     │                     │
    consumer          ◄──────────────┴─────────────────────┼───────────────── second token ...
                                                           │                       │
    decode replica                                       queue ── find pages ── one token to compute

It is the "prebuilt" request of SGLang's scheduler: for the replica that goes on it is one whose prefix is in
the cache. The move itself is that of a stream whose replica is lost; without the pages it is as slow as that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from aioinfer.errors import AioInferError

if TYPE_CHECKING:
    from aioinfer.loop.holding import Prefix
    from aioinfer.parallel.record import Record
    from aioinfer.parallel.replica import Replica

__all__ = ["Handovers", "carry", "relay"]

_log = logging.getLogger("aioinfer")

#: seconds in which pages are stored and carried on, at most; then they are computed again
_PATIENCE = 5.0


class Handovers:
    """Those of one dispatcher that are under way, a task for each."""

    def __init__(
        self, again: Callable[[Record], None], successor: Callable[[Record, int], Replica | None]
    ) -> None:
        """``again``: queues a stream. ``successor``: as :meth:`Placing.successor`."""
        self._again = again
        self._successor = successor
        self._tasks: dict[Record, tuple[asyncio.Task[None], asyncio.TimerHandle]] = {}
        #: with those of streams that have ended meanwhile
        self._all: set[asyncio.Task[None]] = set()
        #: streams that were handed over, and those of them whose pages were not stored in time
        self.done, self.without_pages = 0, 0

    def begin(self, record: Record, source: Replica) -> None:
        """The source computes nothing more of a record: have its pages stored, and then the record queued."""
        self.done += 1
        loop = asyncio.get_running_loop()
        task = loop.create_task(self._store(record, source), name="aioinfer-handover")
        # A worker that hangs cannot be cancelled: the task may outlive this.
        self._tasks[record] = task, loop.call_later(_PATIENCE, self._go_on, record)
        self._all.add(task)
        task.add_done_callback(self._all.discard)

    def __len__(self) -> int:
        return len(self._tasks)

    def drop(self, record: Record) -> None:
        """It has ended. Idempotent."""
        self._end(record)

    def _end(self, record: Record) -> bool:
        found = self._tasks.pop(record, None)
        if found is None:
            return False
        task, timer = found
        task.cancel()
        timer.cancel()
        return True

    def _go_on(self, record: Record) -> None:
        """Whatever is stored, unless the stream has gone on or ended."""
        if self._end(record):
            self.without_pages += not record.stored
            self._again(record)

    async def _store(self, record: Record, source: Replica) -> None:
        try:
            target = None
            if source.exchange is not None and source.exchange.by_messages:
                target = self._successor(record, 0)
                record.near = "" if target is None else target.name
            # The last known token is always computed.
            record.stored = min(await carry(record.prefix, source, target), record.known - 1)
        except AioInferError as error:
            _log.debug("the pages of %s stay on %s: %r", record, source.name, error)
        except Exception:
            _log.exception("the pages of %s could not be stored on %s", record, source.name)
        finally:
            self._go_on(record)

    async def aclose(self) -> None:
        """Wait until all have ended, as their records have; but for no worker that hangs."""
        if self._all:
            await asyncio.wait(self._all, timeout=_PATIENCE)


async def carry(prefix: Prefix, source: Replica, target: Replica | None) -> int:
    """Have a replica store a prefix for others, and carry its pages to the target, where these two do not
    share a store; returns how many of the tokens are there then. Raises EngineError."""
    exchange = source.exchange
    if exchange is None:
        return 0
    stored = await source.store_prefix(prefix)
    if not exchange.by_messages:
        return stored.tokens
    if target is None or target.exchange is None or not stored.names:
        return 0
    return stored.tokens * await relay(source, target, stored.names) // len(stored.names)


async def relay(source: Replica, target: Replica, names: Sequence[bytes]) -> int:
    """Carry pages from one replica to another, piece by piece; returns how many of the first are there then.
    Raises EngineError: one of the two is lost."""
    for count, name in enumerate(names):
        at, total = 0, 1
        while at < total:
            total, data = await source.fetch(name, at)
            right = data and at + len(data) <= total
            if not (right and await target.give(name, at, total, data)):
                return count
            at += len(data)
    return len(names)
