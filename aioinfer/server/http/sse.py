"""SSE: a response of server-sent events, with keep-alive pings and a timeout of slow clients."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from aiohttp import web

from aioinfer.server.http.disconnects import WATCH_INTERVAL, ClientGone, is_gone

__all__ = ["EventStream"]

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx buffers events otherwise
    "X-Accel-Buffering": "no",
}
_PING = b": ping\n\n"


class EventStream:
    """Writes events in order. Backpressure ends here: the engine never waits for a client.

    Writes have no timer of their own, because most do not wait: :meth:`watch` finds a write that is too late.
    """

    def __init__(self, request: web.Request, *, ping_interval: float, send_timeout: float) -> None:
        self._request = request
        self._ping_interval = ping_interval
        self._send_timeout = send_timeout
        self._response = web.StreamResponse(headers=_HEADERS)
        self._time = asyncio.get_running_loop().time
        #: number of unfinished writes, which wait for the client to read
        self._writing = 0
        #: when the last write finished, or the first of the unfinished writes began
        self._progress = 0.0

    @property
    def response(self) -> web.StreamResponse:
        return self._response

    async def open(self) -> None:
        """Send the headers. Raises ClientGone."""
        try:
            await self._response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone(str(error)) from error
        await self._write(b": ok\n\n")

    async def send(self, data: str, name: str | None = None) -> None:
        """Send one event, with the field ``event`` if it has a name. Raises ClientGone. Waits up to the
        timeout of :meth:`watch`."""
        await self._write(_event(data, name))

    async def end(self, data: str | None = None) -> None:
        """End the response, behind one more event if there is ``data``."""
        await self._write(b"" if data is None else _event(data, None), last=True)

    async def watch(self) -> None:
        """Run next to the writers: send pings, and raise ClientGone when the client is gone or has not read
        for ``send_timeout`` seconds."""
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


def _event(data: str, name: str | None) -> bytes:
    return f"data: {data}\n\n".encode() if name is None else f"event: {name}\ndata: {data}\n\n".encode()
