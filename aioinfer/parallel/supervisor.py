"""Supervisor: restarts lost replicas of other processes."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from typing import Any

from aioinfer.parallel.launched import HostUnavailable, LaunchedReplica
from aioinfer.parallel.remote import SocketReplica
from aioinfer.parallel.replica import Replica, ReplicaState

__all__ = ["Supervisor"]

_log = logging.getLogger("aioinfer")

#: seconds before the first restart; each further one waits twice as long, up to the second number
_BACKOFF, _LONGEST = 0.25, 8.0
#: failures within a number of seconds, without a finished request, after which a replica stays down
_MOST_FAILURES, _WINDOW = 3, 60.0


class Supervisor:
    """Starts replicas again that were lost, or connects to them. Those that do no work in between are tried
    later each time, and not for ever if they are started here."""

    def __init__(self, restart: Callable[[str], Awaitable[None]]) -> None:
        """``restart``: that of the dispatcher; it reports another failure as another loss."""
        self._restart = restart
        self._loop = asyncio.get_running_loop()
        self._failures: dict[str, deque[float]] = defaultdict(deque)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    def lost(self, replica: Replica) -> None:
        """Restart a lost replica later; not one that was closed."""
        if self._closed or not isinstance(replica, SocketReplica):
            return
        now, failures = self._loop.time(), self._failures[replica.name]
        if replica.completed:
            failures.clear()
        failures.append(now)
        while failures[0] < now - _WINDOW:
            failures.popleft()
        if len(failures) >= _MOST_FAILURES and _is_at_fault(replica):
            _log.error("the replica %s was lost %d times: it stays down", replica.name, len(failures))
            self._run(replica.aclose())
            return
        delay = min(_LONGEST, _BACKOFF * 2 ** (len(failures) - 1))
        if timer := self._timers.pop(replica.name, None):
            timer.cancel()  # of an earlier loss: it was restarted meanwhile
        self._timers[replica.name] = self._loop.call_later(delay, self._again, replica)

    def _again(self, replica: Replica) -> None:
        del self._timers[replica.name]
        if replica.state is ReplicaState.LOST:  # it was not restarted meanwhile
            self._run(self._restarted(replica.name))

    async def _restarted(self, name: str) -> None:
        try:
            await self._restart(name)
        except Exception as error:
            _log.debug("the replica %s cannot be started: %r", name, error)  # which is logged as a loss

    def _run(self, work: Any) -> None:
        task = self._loop.create_task(work, name="aioinfer-replica")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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


def _is_at_fault(replica: SocketReplica) -> bool:
    """Whether another start would end as this one has: it is started here, and there was a place for it."""
    return isinstance(replica, LaunchedReplica) and not isinstance(replica.cause, HostUnavailable)
