"""Frames: the messages between a dispatcher and a replica in another process, cut out of a stream of bytes.

::

    length of the payload (4 bytes, little-endian)   payload: one message of :mod:`aioinfer.parallel.messages`

Nothing that arrives is trusted: a length is checked before anything of that length is kept, and whatever is
wrong with a frame raises :class:`FrameError`, which ends one connection.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

__all__ = ["HANDSHAKE_LIMIT", "LIMIT", "FrameError", "FrameReader", "frame"]

#: bytes of a payload before the peer has shown its token, and afterwards
HANDSHAKE_LIMIT = 1 << 16
LIMIT = 1 << 26

_HEADER = struct.Struct("<I")


class FrameError(Exception):
    """The bytes are no frame, or the frame not what it should be. The connection cannot go on."""


def frame(payload: bytes) -> bytes:
    """The bytes of a frame. Raises FrameError: the payload is too large to be sent."""
    if len(payload) > LIMIT:
        raise FrameError(f"a frame of {len(payload)} bytes is too large: {LIMIT} are the limit")
    return _HEADER.pack(len(payload)) + payload


class FrameReader:
    """Cuts payloads out of the bytes of one connection, which come in pieces of any size."""

    __slots__ = ("_data", "limit")

    def __init__(self, limit: int = LIMIT) -> None:
        #: bytes of a payload, at most; can be changed between frames
        self.limit = limit
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The payloads that are complete now. Raises FrameError for a length beyond the limit, before bytes
        of that frame are kept."""
        buffer = self._data
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= _HEADER.size:
                (size,) = _HEADER.unpack_from(buffer, at)
                if not 1 <= size <= self.limit:
                    raise FrameError(f"a frame of {size} bytes: 1 to {self.limit} are possible")
                start, end = at + _HEADER.size, at + _HEADER.size + size
                if len(buffer) < end:
                    break
                at = end
                yield bytes(memoryview(buffer)[start:end])
        finally:
            del buffer[:at]
