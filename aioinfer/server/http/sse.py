"""SSE: a response of server-sent events, with keep-alive pings and a timeout of slow clients."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from aioinfer.server.http.disconnects import ClientGone, Watched, Watcher

__all__ = ["EventStream"]

_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    # nginx buffers events otherwise
    "X-Accel-Buffering": "no",
}
_PING = b": ping\n\n"


class EventStream(Watched):
    """Writes events in order. Backpressure ends here: the engine never waits for a client.

    Writes have no timer of their own, because most do not wait: the watcher finds a client that has read
    nothing for ``send_timeout`` seconds, and sends a ping after ``ping_interval`` seconds of silence.
    """

    __slots__ = (
        "_chunked",
        "_direct",
        "_open",
        "_ping_interval",
        "_progress",
        "_read",
        "_send_timeout",
        "_spoke",
        "_time",
        "_written",
        "response",
    )

    def __init__(
        self, request: web.Request, watcher: Watcher, *, ping_interval: float, send_timeout: float
    ) -> None:
        super().__init__(request, watcher)
        self.response = web.StreamResponse(headers=_HEADERS)
        self._ping_interval = ping_interval
        self._send_timeout = send_timeout
        self._time = asyncio.get_running_loop().time
        #: the headers were sent, and the end was not
        self._open = False
        self._chunked = False
        #: bytes so far, and when the last of them were written
        self._written = 0
        self._spoke = 0.0
        #: bytes that aiohttp's writer does not know of
        self._direct = 0
        #: how many of them had left for the client when it was last seen to read, and when that was
        self._read = 0
        self._progress = 0.0

    async def open(self) -> None:
        """Send the headers. Raises ClientGone."""
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone(str(error)) from error
        headers = self.response.headers
        self._chunked = headers.get(hdrs.TRANSFER_ENCODING) == "chunked"
        self._progress = self._time()
        await self._write(b": ok\n\n")
        self._open = True

    async def send(self, data: str, name: str | None = None) -> None:
        """Send one event, with the field ``event`` if it has a name. Raises ClientGone. Waits until the
        client has read enough, or the watcher gives it up."""
        await self._write(_event(data, name))

    async def end(self, data: str | None = None) -> None:
        """End the response, after one more event if there is ``data``."""
        self._open = False
        if self._request.writer is not None:
            # The access log has all bytes.
            self._request.writer.output_size += self._direct
        await self._write(b"" if data is None else _event(data, None), last=True)

    @property
    def transport(self) -> asyncio.Transport | None:
        """The transport to write frames of events to after :meth:`open`; None if there is none."""
        plain = self._chunked and hdrs.CONTENT_ENCODING not in self.response.headers
        return self._request.transport if plain and self._open else None

    def wrote(self, size: int, now: float) -> None:
        """Count bytes that were written to the transport directly, at ``now`` by the loop's clock."""
        self._written += size
        self._direct += size
        self._spoke = now

    def look(self, now: float) -> None:
        """As in Watched, and: send a ping, or give up a client that does not read."""
        super().look(now)
        transport = self._request.transport
        if transport is None or not self.response.prepared or self._error is not None:
            return
        unread = transport.get_write_buffer_size()
        read = self._written - unread
        if not unread or read > self._read:
            self._progress = now
        self._read = read
        if now - self._progress >= self._send_timeout:
            transport.abort()
            self.give_up(ClientGone(f"the client has not read for {self._send_timeout:g} s"))
        elif self._open and not unread and now - self._spoke >= self._ping_interval:
            frame = b"%x\r\n%b\r\n" % (len(_PING), _PING) if self._chunked else _PING
            transport.write(frame)
            self.wrote(len(frame), now)

    async def _write(self, data: bytes, *, last: bool = False) -> None:
        self._written += len(data) + (len(f"{len(data):x}") + 4 if self._chunked else 0)
        self._spoke = self._time()
        try:
            await (self.response.write_eof(data) if last else self.response.write(data))
        except ConnectionError as error:
            raise ClientGone(str(error)) from error


def _event(data: str, name: str | None) -> bytes:
    return f"data: {data}\n\n".encode() if name is None else f"event: {name}\ndata: {data}\n\n".encode()
