"""Records: a page or a state in a file, with a header that says what it is and checksums.

::

    magic  version  key  size of the data  XXH3 of the data  crc32 of the header  |  data

The data goes from the file into the pieces of a view, and back, without a copy in between. A checksum detects
what a disk or an interrupted write has changed; it protects from nobody who wants to deceive.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress

from xxhash import xxh3_64

from aioinfer.tiers.store import Views, size_of

__all__ = ["HEADER", "KEY", "Descriptor", "read_record", "read_views", "write_record", "write_views"]

#: bytes of a key: a name and a kind
KEY = 17
_MAGIC, _VERSION = b"aioinfKV", 1
_FIELDS = struct.Struct(f"<8sI{KEY}sxxxQQ")
_CHECKSUM = struct.Struct("<I")
#: bytes of a header
HEADER = _FIELDS.size + _CHECKSUM.size
#: pieces of one call of the system, on Linux and macOS
_PIECES = 1024


class Descriptor:
    """An open file, which is closed when nobody holds this any more: no call meets a number that has become
    another file's."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.number)


def read_record(file: int, offset: int, size: int, key: bytes, views: Views) -> str:
    """Fill views from a record of ``size`` bytes; why that could not be done, "" if it was. What was read
    until then is junk. Raises OSError."""
    head = bytearray(HEADER)
    fits = size == HEADER + size_of(views)
    got = read_views(file, offset, [memoryview(head), *views] if fits else [memoryview(head)])
    if got < HEADER or head[:8] != _MAGIC:
        return "damaged"
    fields = memoryview(head)[: _FIELDS.size]
    _, version, found, data, checksum = _FIELDS.unpack(fields)
    if _CHECKSUM.unpack_from(head, _FIELDS.size)[0] != zlib.crc32(fields):
        return "damaged"
    if version != _VERSION:
        return "version"
    if found != key or HEADER + data != size:
        return "damaged"
    if not fits:
        return "size"
    return "" if got == size and checksum == _checksum(views) else "damaged"


def write_record(file: int, offset: int, key: bytes, views: Views) -> None:
    """Write a record. Raises OSError."""
    fields = _FIELDS.pack(_MAGIC, _VERSION, key, size_of(views), _checksum(views))
    head = fields + _CHECKSUM.pack(zlib.crc32(fields))
    write_views(file, offset, [memoryview(head), *views])


def read_views(file: int, offset: int, views: Views) -> int:
    """Read from a place of a file into views, as much as there is; bytes. Raises OSError."""
    start = offset
    for left in _batches(views):
        while left:
            got = os.preadv(file, left, offset)
            if not got:
                return offset - start
            offset += got
            left = _behind(left, got)
    return offset - start


def write_views(file: int, offset: int, views: Views) -> None:
    """Write views to a place of a file, all of them. Raises OSError."""
    for left in _batches(views):
        while left:
            done = os.pwritev(file, left, offset)
            offset += done
            left = _behind(left, done)


def _batches(views: Views) -> Iterator[list[memoryview]]:
    for start in range(0, len(views), _PIECES):
        # An empty piece alone would look like the end of the file.
        if batch := [view for view in views[start : start + _PIECES] if len(view)]:
            yield batch


def _behind(views: list[memoryview], size: int) -> list[memoryview]:
    """What is left of views behind their first bytes."""
    for at, view in enumerate(views):
        if size < len(view):
            return [view[size:], *views[at + 1 :]]
        size -= len(view)
    return []


def _checksum(views: Views) -> int:
    """XXH3 of 64 bits, which takes less time than the copy; crc32 takes three times as long as that."""
    found = xxh3_64()
    for view in views:
        found.update(view)
    return found.intdigest()
