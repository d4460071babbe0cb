"""Supervisor: restarts lost replicas of other processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aioinfer.parallel.remote import SocketReplica
from aioinfer.parallel.replica import Replica, ReplicaState

__all__ = ["Supervisor"]

_log = logging.getLogger("aioinfer")

#: seconds before the first restart; each further one waits twice as long, up to the second number
_BACKOFF, _LONGEST = 0.25, 30.0
#: seconds from a restart to another loss, after which that counts as the first
_STEADY = 60.0


class Supervisor:
    """Starts replicas again that were lost, or connects to them, for as long as it takes. Those that neither
    finish a request nor live for a minute in between are tried later each time."""

    def __init__(self, restart: Callable[[str], Awaitable[None]]) -> None:
        """``restart``: that of the dispatcher; it reports another failure as another loss."""
        self._restart = restart
        self._loop = asyncio.get_running_loop()
        #: by name: the pause before the last restart, and when that was to be
        self._last: dict[str, tuple[float, float]] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def lost(self, replica: Replica) -> None:
        """Restart a lost replica later; not one that was closed."""
        if self._closed or not isinstance(replica, SocketReplica):
            return
        now = self._loop.time()
        delay, due = self._last.get(replica.name, (0.0, 0.0))
        steady = replica.completed or now - due >= _STEADY
        delay = min(_LONGEST, 2 * delay) if delay and not steady else _BACKOFF
        self._last[replica.name] = delay, now + delay
        if timer := self._timers.pop(replica.name, None):
            timer.cancel()  # of an earlier loss: it was restarted meanwhile
        self._timers[replica.name] = self._loop.call_later(delay, self._again, replica)

    def _again(self, replica: Replica) -> None:
        del self._timers[replica.name]
        if replica.state is ReplicaState.LOST:  # it was not restarted meanwhile
            task = self._loop.create_task(self._restarted(replica.name), name="aioinfer-replica")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _restarted(self, name: str) -> None:
        try:
            await self._restart(name)
        except Exception as error:
            _log.debug("the replica %s cannot be started: %r", name, error)  # which is logged as a loss

    async def aclose(self) -> None:
        """Start nothing any more, and wait until what was begun is given up."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
