"""Frames: what is written to the sockets of many clients, together where that is possible."""

from __future__ import annotations

import asyncio
from array import array
from typing import TYPE_CHECKING, Protocol

from aioinfer.execution.workers import WorkerExecutor

if TYPE_CHECKING:
    from aioinfer.native.sending import Sender

__all__ = ["FrameWriter", "Target", "descriptor", "load_writer"]


def descriptor(transport: asyncio.Transport) -> int:
    """The file descriptor of a transport whose bytes go to a socket as they are; -1 of others, as of TLS."""
    socket = transport.get_extra_info("socket")
    if socket is None or transport.get_extra_info("sslcontext") is not None:
        return -1
    found = socket.fileno()
    return found if isinstance(found, int) else -1


class Target(Protocol):
    """A client whose stream is written by frames."""

    @property
    def transport(self) -> asyncio.Transport: ...

    @property
    def socket(self) -> int:
        """Of the transport, see :func:`descriptor`."""

    def fail(self, error: Exception) -> None:
        """Writing has raised ``error``."""


class FrameWriter:
    """Collects frames and sends them in one native call; without a sender, writes each at once.

    Several targets may write to one socket, as the choices of one answer do. Their frames are sent as one, so
    that nothing comes between the part that the socket takes and the rest.

    Between :meth:`add` and :meth:`send` no other callback of the loop may run: a transport could be closed
    there, and its descriptor be that of another file.
    """

    __slots__ = ("_frames", "_places", "_sender", "_sockets", "_targets")

    def __init__(self, sender: Sender | None = None) -> None:
        self._sender = sender
        self._frames: list[bytes] = []
        #: by frame, those that wrote to it
        self._targets: list[list[Target]] = []
        self._sockets = array("i")
        #: by socket, where its frame is
        self._places: dict[int, int] = {}

    def add(self, frame: bytes, target: Target, unsent: int) -> None:
        """One more frame for a target whose transport is open; behind those of its socket before it.

        Args:
            unsent: bytes that the transport still has to send: they go first.
        """
        if self._sender is None or unsent or target.socket < 0:
            target.transport.write(frame)
            return
        place = self._places.setdefault(target.socket, len(self._frames))
        if place < len(self._frames):
            self._frames[place] += frame
            self._targets[place].append(target)
            return
        self._frames.append(frame)
        self._targets.append([target])
        self._sockets.append(target.socket)

    def send(self) -> None:
        """Send what was added. A socket that cannot be written to fails alone, with all its targets."""
        if not self._frames:
            return
        assert self._sender is not None
        frames, targets, sockets = self._frames, self._targets, self._sockets
        self._frames, self._targets, self._sockets, self._places = [], [], array("i"), {}
        sent = self._sender.send(sockets, frames)
        for frame, writers, taken in zip(frames, targets, sent, strict=True):
            if taken < len(frame):
                # The transport keeps the rest, and finds out what is wrong with a socket that took nothing.
                try:
                    writers[0].transport.write(frame[taken:])
                except Exception as error:
                    for target in writers:
                        target.fail(error)


async def load_writer() -> FrameWriter:
    """A writer with the native sender, if there is one. Loads it off the loop."""
    executor = WorkerExecutor(1, "aioinfer-sockets")
    try:
        return FrameWriter(await asyncio.get_running_loop().run_in_executor(executor, _load))
    finally:
        executor.shutdown(wait=False)


def _load() -> Sender | None:
    try:
        from aioinfer.native.sending import load_sender  # not on every system
    except ImportError:
        return None
    return load_sender()
