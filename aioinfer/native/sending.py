"""Sending: frames to many sockets in one call, during which other threads run Python.

Each ``send`` of Python gives the interpreter's lock away, and a launch thread that computes then keeps it
for a switch interval. One call for the frames of a step asks for it once.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from aioinfer.native.build import BuildFailed, build_sockets

__all__ = ["Sender", "load_sender"]

_log = logging.getLogger("aioinfer")
_loading = threading.Lock()


class Sender:
    """The loaded library."""

    def __init__(self, path: Path) -> None:
        """Raises OSError: it cannot be loaded."""
        self._send = ctypes.CDLL(str(path)).send_frames
        address, number = ctypes.c_void_p, ctypes.c_int64
        self._send.argtypes = [address, ctypes.c_char_p, address, number, address]
        self._send.restype = None

    def send(self, sockets: array[int], frames: Sequence[bytes]) -> Sequence[int]:
        """Send every frame to its socket, as far as that takes it at once.

        Args:
            sockets: open file descriptors that do not block, an array of type "i".

        Returns the number of bytes that each socket has taken; 0 if it failed, too.
        """
        lengths = array("q", map(len, frames))
        sent = array("q", bytes(8 * len(frames)))
        addresses = [each.buffer_info()[0] for each in (sockets, lengths, sent)]
        self._send(addresses[0], b"".join(frames), addresses[1], len(frames), addresses[2])
        return sent


def load_sender() -> Sender | None:
    """The sender of this process; None where none can be compiled or loaded, which is logged once.

    May take a second the first time. On any thread.
    """
    with _loading:
        return _load()


@cache
def _load() -> Sender | None:
    try:
        return Sender(build_sockets())
    except (BuildFailed, OSError) as error:
        _log.info("streams are written one by one, which costs more: %s", error)
        return None
