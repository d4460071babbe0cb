"""Clients that disconnect: noticed within half a second, and quietly, by one timer for all requests."""

from __future__ import annotations

import asyncio
from itertools import islice
from types import TracebackType
from typing import Self

from aiohttp import web

from aioinfer.client.disconnects import hung_up

__all__ = ["WATCH_INTERVAL", "ClientGone", "Watched", "Watcher", "is_gone"]

#: seconds between checks of a connection
WATCH_INTERVAL = 0.5
#: checks in a row, and turns of the loop over which the checks of one interval are spread at most
_AT_ONCE, _TURNS = 64, 16


class ClientGone(ConnectionError):
    """The client has closed its connection, or has not read for ``send_timeout`` seconds."""


def is_gone(request: web.Request) -> bool:
    """The connection of a request is closed."""
    return request.transport is None or request.transport.is_closing()


class Watcher:
    """Looks at every request under way once in ``interval`` seconds."""

    def __init__(self, interval: float = WATCH_INTERVAL) -> None:
        self._interval = min(interval, WATCH_INTERVAL)
        #: those that were not looked at for longest come first
        self._watched: dict[Watched, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def add(self, watched: Watched) -> None:
        """Begin to look at it. On the event loop."""
        self._watched[watched] = None
        if self._timer is None:
            self._set_timer()

    def remove(self, watched: Watched) -> None:
        """Look at it no more. Idempotent."""
        self._watched.pop(watched, None)
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set_timer(self) -> None:
        turns = max(1, min(_TURNS, len(self._watched) // _AT_ONCE))
        self._timer = asyncio.get_running_loop().call_later(self._interval / turns, self._look)

    def _look(self) -> None:
        self._set_timer()  # first: what a look raises ends this turn only
        now = asyncio.get_running_loop().time()
        count = max(_AT_ONCE, -(-len(self._watched) // _TURNS))
        for watched in [*islice(self._watched, count)]:
            if watched in self._watched:
                del self._watched[watched]
                self._watched[watched] = None
                watched.look(now)


class Watched:
    """A request whose task raises ClientGone when its client is gone: an asynchronous context manager.

    :func:`aioinfer.server.serve` cancels handlers on disconnect; an application with these routes may not.
    The task is cancelled as by :func:`asyncio.timeout`, so nothing has to run beside it.
    """

    __slots__ = ("_cancelling", "_error", "_request", "_task", "_watcher")

    def __init__(self, request: web.Request, watcher: Watcher) -> None:
        self._request = request
        self._watcher = watcher
        self._task: asyncio.Task[None] | None = None
        self._cancelling = 0
        #: why it was ended
        self._error: ClientGone | None = None

    async def __aenter__(self) -> Self:
        task = self._task = asyncio.current_task()
        assert task is not None
        self._cancelling = task.cancelling()
        self._watcher.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watcher.remove(self)
        task, self._task = self._task, None
        if self._error is None or task is None:
            return
        others = task.uncancel() > self._cancelling
        if isinstance(error, asyncio.CancelledError) and not others:
            raise self._error from None

    def look(self, now: float) -> None:
        """End the task if the client is gone; ``now`` is the loop's time."""
        transport = self._request.transport
        if hung_up(transport):
            if transport is not None:
                transport.abort()  # what else it has sent is for nobody
            self.give_up(ClientGone("the client has closed its connection"))

    def give_up(self, error: ClientGone) -> None:
        """Raise ``error`` where the task waits. Idempotent."""
        if self._task is not None and self._error is None:
            self._error = error
            self._task.cancel()
