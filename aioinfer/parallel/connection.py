"""Connection: messages over a stream socket, for both of its ends. A protocol, so that there is no task."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeAlias, cast

from aioinfer.errors import ConfigError, EngineFailed, shown
from aioinfer.forks import drop_file
from aioinfer.loop.belonging import end_in_children
from aioinfer.parallel.frames import HANDSHAKE_LIMIT, LIMIT, FrameError, FrameReader, frame
from aioinfer.parallel.messages import Decoder, Message, encoded

__all__ = ["BEAT", "LOST", "PATIENCE", "SILENT", "Connect", "Connection", "End", "connector"]

#: seconds between two frames of either end, at most
BEAT = 0.25
#: beats without a frame after which a replica gets no new work, and after which a peer is lost. Between them
#: its process may be stopped, swapped out, or held up by one call: what it computes is not given up
SILENT, LOST = 4, 120
#: seconds in which a replica must have answered
PATIENCE = 10.0

#: opens a connection with the protocol that it is given
Connect: TypeAlias = Callable[[Callable[[], asyncio.Protocol]], Awaitable[Any]]


def connector(address: str) -> Connect:
    """A function that connects to ``HOST:PORT``, or to the path of a Unix socket. Raises ConfigError."""
    host, _, port = address.rpartition(":")
    is_path = "/" in address
    if not is_path and not (host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"a replica's address must be HOST:PORT or a path, got {shown(address)}")

    async def connect(protocol: Callable[[], asyncio.Protocol]) -> Any:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE):
            if is_path:
                return await loop.create_unix_connection(protocol, address)
            return await loop.create_connection(protocol, host.strip("[]"), int(port))

    return connect


class End(Protocol):
    """Hears from a connection, on its loop."""

    def connected(self) -> None:
        """The socket is open: messages can be sent."""

    def received(self, message: Any) -> None:
        """A message. Raises FrameError, which ends the connection."""

    def beat(self) -> Message:
        """What says that this end is alive. Called once per :data:`BEAT`."""

    def fill(self) -> bool:
        """Send what has waited for the socket to take more. Called once per turn of the loop in which
        something is sent, before it is written. Whether there is more."""

    def ended(self, cause: BaseException | None) -> None:
        """Called once, last. ``cause``: the error; None: the peer closed it, or this end did."""


class Connection(asyncio.Protocol):
    """Writes all messages that were sent in one turn of the loop in the next one, in one call."""

    def __init__(self, end: End, decode: Decoder) -> None:
        """``decode``: reads the first message."""
        self._end = end
        self._decode = decode
        self._loop = asyncio.get_running_loop()
        self._frames = FrameReader(HANDSHAKE_LIMIT)
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._due = False
        #: the socket takes nothing at the moment: messages would wait in memory
        self.full = False
        self._cause: BaseException | None = None
        #: beats since the last frame
        self.silence = 0
        self._timer: asyncio.TimerHandle | None = None
        self.closed = False
        #: done when the socket is closed
        self.gone: asyncio.Future[None] = self._loop.create_future()

    # -- as asyncio.Protocol ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        end_in_children(self)
        self._end.connected()

    def data_received(self, data: bytes) -> None:
        try:
            for payload in self._frames.feed(data):
                if self.closed:
                    return
                self.silence = 0
                self._end.received(self._decode(payload))
        except FrameError as error:
            self.abort(error)

    def pause_writing(self) -> None:
        self.full = True

    def resume_writing(self) -> None:
        self.full = False
        self.write_soon()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._cause is None:
            self._cause = exc
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        if not self.gone.done():
            self.gone.set_result(None)
            self._end.ended(self._cause)

    # -- for its end ------------------------------------------------------------------------------

    def trust(self, decode: Decoder) -> None:
        """From now on, frames may be long, and ``decode`` reads them."""
        self._frames.limit, self._decode = LIMIT, decode

    def begin_beats(self) -> None:
        """Begin to send and to expect heartbeats."""
        self._timer = self._loop.call_later(BEAT, self._beat)

    def _beat(self) -> None:
        # It counts looks and not seconds: when this loop has stood still, nothing was read meanwhile.
        self._timer = self._loop.call_later(BEAT, self._beat)
        self.silence += 1
        if self.silence >= LOST:
            self.abort(EngineFailed(f"no frame for {LOST * BEAT:g} s"))
            return
        message = self._end.beat()
        if not self.full:
            self.send(message)

    def send(self, message: Message) -> None:
        """Send a message. Raises FrameError: it is too large, or has no encoding."""
        if not self.closed:
            self._out.append(frame(encoded(message)))
            self.write_soon()

    def write_soon(self) -> None:
        """Call :meth:`End.fill`, and write, in the next turn of the loop."""
        if not self._due and not self.closed:
            self._due = True
            self._loop.call_soon(self._write)

    def _write(self) -> None:
        more = False
        if not (self.closed or self._transport is None):
            more = not self.full and self._end.fill()
            if self._out:
                data, self._out = b"".join(self._out), []
                self._transport.write(data)
        self._due = False
        if more and not self.full:  # else it is called when the socket takes more
            self.write_soon()

    def finish(self) -> None:
        """Write what was sent, and close the socket. Nothing more is received."""
        if not self.closed:
            self._write()
            self.closed = True
            if self._transport is not None:
                self._transport.close()

    def abort(self, cause: BaseException | None = None) -> None:
        """Close the socket at once, without waiting for unwritten messages. Idempotent."""
        if not self.closed:
            self._cause = cause
        self.closed = True
        if self._transport is not None and not self.gone.done():
            self._transport.abort()

    def forked(self) -> None:
        """In a child of a fork: the peer does not wait for that to end."""
        if self._transport is not None and not self.gone.done():
            drop_file(self._transport.get_extra_info("socket"))

    def outlive_loop(self) -> None:
        """Close the socket of a loop that is closed: so that the peer knows."""
        self.closed = True
        found = None if self._transport is None else self._transport.get_extra_info("socket")
        with contextlib.suppress(OSError):  # uvloop has closed it with the loop
            if found is not None:
                found.shutdown(socket.SHUT_RDWR)
