"""SSE: one response of server-sent events, kept alive in silence, given up when nobody reads."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from aiohttp import web

__all__ = ["ClientGone", "EventStream", "is_gone"]

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx would collect the events into blocks
    "X-Accel-Buffering": "no",
}
_PING = b": ping\n\n"
#: How often a connection is looked at that nothing is being written to.
WATCH_INTERVAL = 0.5


class ClientGone(ConnectionError):
    """The client has closed its connection, or has not read for too long."""


class EventStream:
    """Writes events in the order given. Backpressure ends here: the engine never waits for a client.

    A write takes no timer of its own, for most never wait: :meth:`watch` sees the one that waits too long.
    """

    def __init__(self, request: web.Request, *, ping_interval: float, send_timeout: float) -> None:
        self._request = request
        self._ping_interval = ping_interval
        self._send_timeout = send_timeout
        self._response = web.StreamResponse(headers=_HEADERS)
        self._time = asyncio.get_running_loop().time
        #: writes under way, which wait for the client to read
        self._writing = 0
        #: when one began with none under way, or was through
        self._progress = 0.0

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def open(self) -> None:
        """Send the headers."""
        await self._response.prepare(self._request)
        await self._write(b": ok\n\n")

    async def send(self, data: str) -> None:
        """Send one event. Raises ClientGone. May wait for as long as :meth:`watch` lets it."""
        await self._write(f"data: {data}\n\n".encode())

    async def close(self) -> None:
        """The last event of the protocol, and the end of the response."""
        await self._write(b"data: [DONE]\n\n", last=True)

    async def watch(self) -> None:
        """Run beside the writers: ping when there is silence, raise ClientGone when the client is gone or has
        not read for too long."""
        while True:
            await asyncio.sleep(min(WATCH_INTERVAL, self._ping_interval, self._send_timeout))
            if is_gone(self._request):
                raise ClientGone("the client has closed its connection")
            silence = self._time() - self._progress
            if self._writing:
                if silence >= self._send_timeout:
                    self._give_up()
            elif self._response.prepared and silence >= self._ping_interval:
                await self._ping()

    async def _ping(self) -> None:
        try:
            async with asyncio.timeout(self._send_timeout):
                await self._write(_PING)
        except TimeoutError:
            self._give_up()

    def _give_up(self) -> NoReturn:
        if self._request.transport is not None:
            self._request.transport.abort()
        raise ClientGone(f"the client has not read for {self._send_timeout:g} s")

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        if not self._writing:
            self._progress = self._time()
        self._writing += 1
        try:
            await (self._response.write_eof(data) if last else self._response.write(data))
            self._progress = self._time()
        except ConnectionError as error:
            raise ClientGone(str(error)) from error
        finally:
            self._writing -= 1


def is_gone(request: web.Request) -> bool:
    """The connection of a request is closed."""
    return request.transport is None or request.transport.is_closing()
