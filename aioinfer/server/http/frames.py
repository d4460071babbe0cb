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

    Between :meth:`add` and :meth:`send` no other callback of the loop may run: a transport could be closed
    there, and its descriptor be that of another file.
    """

    __slots__ = ("_frames", "_sender", "_sockets", "_targets")

    def __init__(self, sender: Sender | None = None) -> None:
        self._sender = sender
        self._frames: list[bytes] = []
        self._targets: list[Target] = []
        self._sockets = array("i")

    def add(self, frame: bytes, target: Target, unsent: int) -> None:
        """One more frame for a target whose transport is open; not two for one before :meth:`send`.

        Args:
            unsent: bytes that the transport still has to send: they go first.
        """
        if self._sender is None or unsent or target.socket < 0:
            target.transport.write(frame)
            return
        self._frames.append(frame)
        self._targets.append(target)
        self._sockets.append(target.socket)

    def send(self) -> None:
        """Send what was added. A target that cannot be written to fails alone."""
        if not self._frames:
            return
        assert self._sender is not None
        frames, targets, sockets = self._frames, self._targets, self._sockets
        self._frames, self._targets, self._sockets = [], [], array("i")
        sent = self._sender.send(sockets, frames)
        for frame, target, taken in zip(frames, targets, sent, strict=True):
            if taken < len(frame):
                # The transport keeps the rest, and finds out what is wrong with a socket that took nothing.
                try:
                    target.transport.write(frame[taken:])
                except Exception as error:
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
