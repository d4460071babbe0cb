"""The two sides of a request that an ASGI server has, as aiohttp knows them: a transport and a writer.

Nothing is framed and no connection is kept here: both are the server's. Bytes go to ``send`` one event after
the other, and whoever writes waits until the server has taken them, which is how a slow client slows its
writer down.
"""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import ClientConnectionResetError, hdrs
from aiohttp.abc import AbstractStreamWriter
from multidict import CIMultiDict

from aioinfer.server.asgi.scopes import CODEC, Message, Scope, Send

__all__ = ["AsgiTransport", "AsgiWriter"]

#: headers of a response that are the server's own
_SERVERS = (hdrs.DATE, hdrs.SERVER, hdrs.TRANSFER_ENCODING)


class AsgiTransport(asyncio.Transport):
    """What a request calls its transport.

    It is closing from the moment in which the client has left or was given up. ``abort`` ends the response
    where it is: the exchange returns without its end, and the server closes the connection.
    """

    def __init__(self, scope: Scope, send: Send) -> None:
        client = scope.get("client")
        super().__init__({"peername": None if client is None else tuple(client)})
        self._send = send
        self._turn = asyncio.Lock()
        self._unsent = 0
        self._closing = False
        self._readable = asyncio.Event()
        self._readable.set()
        #: the last event was passed on, or is being passed on
        self.complete = False
        #: what writes without waiting
        self.writing: set[asyncio.Task[None]] = set()

    async def start(self, status: int, headers: CIMultiDict[str]) -> None:
        """Begin the response. Raises ClientConnectionResetError."""
        raw = [(name.lower().encode(), value.encode(*CODEC)) for name, value in headers.items()]
        await self._pass_on({"type": "http.response.start", "status": status, "headers": raw})

    async def send(self, data: bytes, *, more: bool) -> None:
        """So much of the body, and its end unless there is ``more``. Raises ClientConnectionResetError."""
        self._unsent += len(data)
        try:
            await self._pass_on({"type": "http.response.body", "body": data, "more_body": more})
        finally:
            self._unsent -= len(data)

    async def _pass_on(self, message: Message) -> None:
        async with self._turn:
            if self._closing or self.complete:
                raise ClientConnectionResetError("Cannot write to closing transport")
            self.complete = not message.get("more_body", True)
            try:
                await self._send(message)
            except OSError as error:  # what a server may raise when the client has left
                self.close()
                raise ClientConnectionResetError("the client has closed its connection") from error

    async def readable(self) -> None:
        """Wait until the body may be received further."""
        await self._readable.wait()

    # -- asyncio.Transport ----------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Send so much of the body, without waiting: for the rare and small."""
        task = asyncio.get_running_loop().create_task(self._write(bytes(data)))
        self.writing.add(task)
        task.add_done_callback(self.writing.discard)

    async def _write(self, data: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # whoever waits for the client learns of it
            await self.send(data, more=True)

    def get_write_buffer_size(self) -> int:
        """Bytes that the server has not taken yet."""
        return self._unsent

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def abort(self) -> None:
        self._closing = True

    def pause_reading(self) -> None:
        self._readable.clear()

    def resume_reading(self) -> None:
        self._readable.set()


class AsgiWriter(AbstractStreamWriter):
    """Where a response writes: its headers and pieces become events."""

    def __init__(self, transport: AsgiTransport, *, closable: bool) -> None:
        """``closable``: the version of HTTP has the header ``Connection``."""
        self._transport = transport
        self._closable = closable
        #: the headers were passed on
        self.started = False
        self._ended = False

    @property
    def transport(self) -> AsgiTransport:
        return self._transport

    async def write_headers(self, status_line: str, headers: CIMultiDict[str]) -> None:
        """Those that are the server's are taken out of ``headers``: so a response, too, knows that its body
        is not chunked here."""
        if self.started:
            self._transport.abort()
            raise ClientConnectionResetError("a response was begun already")
        self.started = True
        # Nobody reads the rest of the request now: it must not be in the way of a disconnect.
        self._transport.resume_reading()
        for name in _SERVERS:
            headers.popall(name, None)
        if not (self._closable and headers.get(hdrs.CONNECTION) == "close"):
            headers.popall(hdrs.CONNECTION, None)
        await self._transport.start(int(status_line.split(" ")[1]), headers)

    async def write(self, chunk: bytes | bytearray | memoryview) -> None:
        if chunk:
            self.output_size += len(chunk)
            await self._transport.send(bytes(chunk), more=True)

    async def write_eof(self, chunk: bytes = b"") -> None:
        if not self._ended:
            self._ended = True
            self.output_size += len(chunk)
            await self._transport.send(bytes(chunk), more=False)

    async def drain(self) -> None:
        """Whoever writes has waited already."""

    def enable_chunking(self) -> None:
        """Left to the server."""

    def enable_compression(self, encoding: str = "deflate", strategy: int | None = None) -> None:
        raise NotImplementedError("compression of responses")
