"""Frames: what a dispatcher and a replica in another process send each other, cut out of a stream of bytes.

::

    length of kind and payload (4 bytes, little-endian)   kind (1 byte)   payload

Nothing that arrives is trusted: a length is checked before anything of that length is read, and whatever is
wrong with a frame raises :class:`FrameError`, which ends one connection. What payloads mean is in
:mod:`aioinfer.parallel.messages` and :mod:`aioinfer.parallel.columns`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum

__all__ = ["HANDSHAKE_LIMIT", "LIMIT", "PROTOCOL", "Frame", "FrameError", "FrameReader", "Kind", "frame"]

#: of all that follows the handshake; whoever speaks another one is refused
PROTOCOL = 4
#: bytes of a frame before the peer has shown its token, and afterwards
HANDSHAKE_LIMIT = 1 << 16
LIMIT = 1 << 26

_HEADER = struct.Struct("<IB")


class FrameError(Exception):
    """The bytes are no frame, or the frame not what it should be. The connection cannot go on."""


class Kind(IntEnum):
    """What a frame is. Those below 16 go to a replica, the others come from it."""

    HELLO = 1
    SUBMIT = 2
    ABORT = 3
    #: the consumer of a stream with ``max_lag`` has read so far
    READ = 4
    PAUSE = 5
    RESUME = 6
    FLUSH = 7
    PING = 8
    #: load or unload an adapter, or leave that
    ADAPT = 9

    WELCOME = 16
    REFUSED = 17
    #: what a step has brought, or several
    ROWS = 18
    #: also says that the replica is alive
    STATS = 19
    PAUSED = 20
    #: it is told to end: its streams should go on elsewhere
    LEAVING = 21
    #: its engine is lost
    LOST = 22
    #: what came of an adapter, and which there are now
    ADAPTED = 23


Frame = tuple[Kind, bytes]


def frame(kind: Kind, *parts: bytes) -> bytes:
    """The bytes of a frame. Raises FrameError: the payload is too large to be sent."""
    size = sum(map(len, parts)) + 1
    if size > LIMIT:
        raise FrameError(f"a frame of {size} bytes is too large: {LIMIT} are the limit")
    return b"".join((_HEADER.pack(size, kind), *parts))


class FrameReader:
    """Cuts frames out of the bytes of one connection, which come in pieces of any size."""

    __slots__ = ("_data", "limit")

    def __init__(self, limit: int = LIMIT) -> None:
        #: bytes of a frame, at most; can be changed between frames
        self.limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """The frames that are complete now. Raises FrameError for a length beyond the limit, before bytes of
        that frame are kept, and for a kind that does not exist."""
        buffer = self._data
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _HEADER.size:
                size, kind = _HEADER.unpack_from(buffer, at)
                if not 1 <= size <= self.limit:
                    raise FrameError(f"a frame of {size} bytes: 1 to {self.limit} are possible")
                end = at + _HEADER.size - 1 + size
                if len(buffer) < end:
                    break
                payload = bytes(memoryview(buffer)[at + _HEADER.size : end])
                at = end
                try:
                    found = Kind(kind)
                except ValueError:
                    raise FrameError(f"there are no frames of kind {kind}") from None
                yield found, payload
        finally:
            del buffer[:at]
