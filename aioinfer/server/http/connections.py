"""The open connections of a server: bounded in number, and none waits for its client for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Container
from typing import Any, cast

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aioinfer.server.http.failures import Failure
from aioinfer.server.http.logs import Throttle

__all__ = ["SURPLUS", "Connection", "Connections"]

_log = logging.getLogger("aioinfer.server")

#: seconds between two looks at all connections
_LOOK_INTERVAL = 1.0
#: connections beyond the limit whose next request gets a response; those beyond these are closed at once
SURPLUS = 16


class Connections:
    """Counts and watches the connections of a listening socket.

    aiohttp closes idle connections. This closes those without a first request after ``header_timeout``
    seconds, and those whose client has not read for ``send_timeout`` seconds. Beyond ``limit`` connections,
    the one that has been without a request for longest makes room. If all have one, requests of new
    connections get 503, except for the paths ``unlimited``.
    """

    def __init__(
        self, *, limit: int, header_timeout: float, send_timeout: float, unlimited: Container[str]
    ) -> None:
        self._limit = limit
        self._header_timeout = header_timeout
        self._send_timeout = send_timeout
        self._unlimited = unlimited
        self._open: set[Connection] = set()
        #: those without a request, longest first
        self._waiting: dict[Connection, None] = {}
        self._full = Throttle(_log)
        self._loop = asyncio.get_running_loop()
        self._looking: asyncio.TimerHandle | None = None
        self._look()

    def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    def __len__(self) -> int:
        return len(self._open)

    # -- called by connections ------------------------------------------------------------------

    def add(self, connection: Connection) -> bool:
        """Whether a new connection is kept."""
        self._open.add(connection)
        while len(self._open) > self._limit and self._make_room():
            pass
        if len(self._open) > self._limit:
            connection.surplus = True
            if len(self._open) > self._limit + SURPLUS:
                self._open.discard(connection)
                self._full.warning(f"{self._limit} connections are open: a new one was closed")
                return False
        self._waiting[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def _make_room(self) -> bool:
        """Close the connection that has been without a request for longest."""
        for connection in self._waiting:
            if not connection.unsent:
                self.remove(connection)
                connection.abort()
                self._full.warning(f"{self._limit} connections are open: an idle one was closed")
                return True
        return False

    def _look(self) -> None:
        now = self._loop.time()
        late = now - self._header_timeout
        for connection in [*self._open]:
            unserved = not connection.served and connection.opened <= late
            if unserved or connection.stuck(now, self._send_timeout):
                connection.abort()
        interval = min(_LOOK_INTERVAL, self._header_timeout / 4, self._send_timeout / 4)
        self._looking = self._loop.call_later(interval, self._look)

    # -- around every request -------------------------------------------------------------------

    @property
    def middleware(self) -> Middleware:
        @web.middleware
        async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
            protocol = request.protocol
            if not isinstance(protocol, Connection):
                return await handler(request)
            protocol.served = protocol.busy = True
            self._waiting.pop(protocol, None)
            try:
                if protocol.surplus and request.path not in self._unlimited:
                    return self._refusal()
                return await handler(request)
            finally:
                protocol.busy = False
                # After the response, which is written when this returns.
                self._loop.call_soon(self._wait_again, protocol)

        return counted

    def _wait_again(self, connection: Connection) -> None:
        if connection in self._open and not connection.busy:
            self._waiting[connection] = None

    def _refusal(self) -> web.Response:
        self._full.warning(f"{self._limit} connections are open: a request was refused")
        failure = Failure(
            503,
            "service_unavailable_error",
            "too many connections are open",
            code="too_many_connections",
            headers={"Retry-After": "5"},
            close=True,
        )
        return failure.response()


class Connection(web.RequestHandler):
    """One connection of aiohttp's, counted and watched."""

    __slots__ = ("_connections", "_kept", "_least", "_progress", "busy", "opened", "served", "surplus")

    def __init__(self, connections: Connections, server: web.Server, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        super().__init__(server, loop=loop, **options)
        self._connections = connections
        self._kept = False
        self.opened = loop.time()
        #: it had a request
        self.served = False
        #: it has a request now
        self.busy = False
        #: it was opened beyond the limit
        self.surplus = False
        #: fewest unsent bytes since the last write, and since when
        self._least = 0
        self._progress = 0.0

    @property
    def unsent(self) -> int:
        """Bytes that the client has not read, besides those in its and the system's buffers."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    def stuck(self, now: float, timeout: float) -> bool:
        """Whether the client has read nothing for ``timeout`` seconds although the response waits for it."""
        if self.transport is None or not (self.writing_paused or self.transport.is_closing()):
            self._least = 0
            return False
        unsent = self.unsent
        if not unsent or not self._least or unsent < self._least:
            self._least, self._progress = unsent, now
            return False
        return now - self._progress >= timeout

    def abort(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._kept = self._connections.add(self)
        if self._kept:
            super().connection_made(transport)
        else:
            cast(asyncio.Transport, transport).abort()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._connections.remove(self)
        if self._kept:
            super().connection_lost(exc)
