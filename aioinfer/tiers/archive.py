"""Archive: pages in one file that is written once, with a header for whoever wrote it.

::

    magic  version  size of the header  crc32 of the header  |  header: an object of JSON
    records of pages and states (records.py)
    index: key, offset and size of each record
    offset of the index  crc32 of the index  magic

A file is refused if its header or its index is not whole; a damaged page is a miss. Nothing in it is run, and
no number in it is believed before it was compared with the size of the file.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from aioinfer.errors import AioInferError, why
from aioinfer.system.files import open_at_once
from aioinfer.system.locks import lock_file
from aioinfer.tiers.records import HEADER, KEY, Descriptor, read_record, read_views, write_record, write_views
from aioinfer.tiers.store import BaseStore, Views, is_page, size_of

__all__ = ["Archive", "ArchiveError", "ArchiveWriter", "remove_unfinished"]

_MAGIC, _VERSION = b"aioinfAR", 1
_HEAD = struct.Struct("<8sIQI")
_ENTRY = struct.Struct(f"<{KEY}sQQ")
_END = struct.Struct("<QI8s")
#: bytes of a header, and containers within each other
_MAX_HEADER = 256 << 20
_MAX_DEPTH = 64
#: behind the name of a file that is being written
_UNFINISHED = ".part"


class ArchiveError(AioInferError, ValueError):
    """A file is no archive, or not a whole one; or it cannot be read or written."""


class Archive(BaseStore):
    """The pages of an archive, for reading.

    Attributes:
        header: what its writer gave it: an object of JSON, unchecked but for its syntax and depth.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Open it, and read its header and index. Raises ArchiveError."""
        super().__init__(f"the archive {os.fspath(path)}")
        self._index: dict[bytes, tuple[int, int]] = {}
        self.header: dict[str, Any] = {}
        try:
            self._file: Descriptor | None = Descriptor(open_at_once(path))
            self._open(self._file.number)
        except OSError as error:
            raise ArchiveError(f"{os.fspath(path)} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ArchiveError(f"{os.fspath(path)} is no archive of pages, or damaged: {error}") from error
        self._size = sum(size for _, size in self._index.values())

    def _open(self, file: int) -> None:
        size = os.fstat(file).st_size
        magic, version, length, checksum = _HEAD.unpack(_bytes(file, 0, _HEAD.size))
        if magic != _MAGIC:
            raise ValueError("it begins otherwise")
        if version != _VERSION:
            raise ValueError(f"its version is {version}, and this reads {_VERSION}")
        if length > min(size, _MAX_HEADER):
            raise ValueError(f"its header has {length} bytes")
        text = _bytes(file, _HEAD.size, length)
        if zlib.crc32(text) != checksum:
            raise ValueError("its header has another checksum")
        self.header = _parsed(text)
        offset, checksum, magic = _END.unpack(_bytes(file, size - _END.size, _END.size))
        count, rest = divmod(size - _END.size - offset, _ENTRY.size)
        if magic != _MAGIC or rest or not 0 <= count * HEADER <= offset:
            raise ValueError("its end is missing")
        index = _bytes(file, offset, count * _ENTRY.size)
        if zlib.crc32(index) != checksum:
            raise ValueError("its index has another checksum")
        self._index = {key: (start, length) for key, start, length in _ENTRY.iter_unpack(index)}
        if any(start + length > offset for start, length in self._index.values()):
            raise ValueError("its index names what is not there")

    def _has(self, key: bytes) -> bool:
        return key in self._index

    def _read(self, key: bytes, views: Views) -> str:
        file, found = self._file, self._index.get(key)
        if file is None or found is None:
            return "absent"
        fault = read_record(file.number, *found, key, views)
        if fault:
            self._index.pop(key, None)
        return fault

    def _put(self, key: bytes, views: Views) -> str:
        return "read only"

    def _forget(self, key: bytes) -> None:
        self._index.pop(key, None)

    def _held(self) -> tuple[int, int]:
        return len(self._index), self._size

    def close(self) -> None:
        super().close()
        self._file = None


class ArchiveWriter(BaseStore):
    """An archive that is being written, at a name of its own beside it until :meth:`finish`."""

    def __init__(self, path: str | os.PathLike[str], header: Mapping[str, Any]) -> None:
        """Raises ArchiveError: it cannot be written there, or another one is being written; or the header is
        too large, too deep or cannot be JSON."""
        self._path = os.fspath(path)
        super().__init__(f"the archive {self._path}")
        self._index: dict[bytes, tuple[int, int]] = {}
        try:
            text = json.dumps(header, allow_nan=False, separators=(",", ":")).encode()
            if len(text) > _MAX_HEADER:
                raise ValueError(f"it has {len(text)} bytes")
            _check_depth(header)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArchiveError(f"the header cannot be saved: {why(error)}") from error
        self._file: Descriptor | None = None
        try:
            self._file = Descriptor(lock_file(self._path + _UNFINISHED))
            os.ftruncate(self._file.number, 0)
            head = _HEAD.pack(_MAGIC, _VERSION, len(text), zlib.crc32(text))
            write_views(self._file.number, 0, [memoryview(head), memoryview(text)])
        except OSError as error:
            self.close()
            busy = isinstance(error, BlockingIOError)
            reason = "it is being written" if busy else error.strerror or error
            raise ArchiveError(f"{self._path} cannot be written: {reason}") from error
        self._end = len(head) + len(text)

    def _has(self, key: bytes) -> bool:
        return key in self._index

    def _read(self, key: bytes, views: Views) -> str:
        file, found = self._file, self._index.get(key)
        return "absent" if file is None or found is None else read_record(file.number, *found, key, views)

    def _put(self, key: bytes, views: Views) -> str:
        with self._lock:
            if (file := self._file) is None:
                return "closed"
            if key in self._index:
                return ""
            # A place of its own; what fails leaves a hole that the index does not name.
            start, size = self._end, HEADER + size_of(views)
            self._end += size
        write_record(file.number, start, key, views)
        with self._lock:
            self._index[key] = start, size
        self._wrote(key, size - HEADER)
        return ""

    def _forget(self, key: bytes) -> None:
        self._index.pop(key, None)

    def _held(self) -> tuple[int, int]:
        return len(self._index), self._end

    def finish(self) -> int:
        """Write the index, have all bytes on the disk, and give the file its name, in place of one that is
        there; how many pages are in it: those whose ``put`` was true. Raises ArchiveError, and nothing is
        left."""
        with self._lock:
            file, self._file = self._file, None
        try:
            if file is None or self._closed:
                raise ArchiveError(f"{self._path} was closed before it was whole")
            entries = b"".join(_ENTRY.pack(key, *place) for key, place in self._index.items())
            end = _END.pack(self._end, zlib.crc32(entries), _MAGIC)
            write_views(file.number, self._end, [memoryview(entries), memoryview(end)])
            os.fsync(file.number)
            os.replace(self._path + _UNFINISHED, self._path)
        except OSError as error:
            with suppress(OSError):
                os.unlink(self._path + _UNFINISHED)
            raise ArchiveError(f"{self._path} cannot be written: {error.strerror or error}") from error
        finally:
            super().close()
        return sum(map(is_page, self._index))

    def close(self) -> None:
        """End it; what was not finished is removed."""
        super().close()
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                os.unlink(self._path + _UNFINISHED)


def remove_unfinished(directory: str | os.PathLike[str]) -> None:
    """Remove what killed processes have left of archives in a directory. Raises OSError if it cannot be
    listed."""
    for name in os.listdir(directory):
        if name.endswith(_UNFINISHED):
            path = os.path.join(directory, name)
            with suppress(OSError):  # it is being written
                held = Descriptor(lock_file(path))
                os.unlink(path)
                del held


def _bytes(file: int, offset: int, size: int) -> bytes:
    """Bytes at a place of a file. Raises ValueError where it ends before."""
    found = bytearray(size)
    if offset < 0 or read_views(file, offset, [memoryview(found)]) < size:
        raise ValueError("it is cut")
    return bytes(found)


def _parsed(text: bytes) -> dict[str, Any]:
    """An object of JSON. Raises ValueError."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("its header is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("its header is no object")
    _check_depth(found)
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"its header has the number {name}")


def _check_depth(value: Any) -> None:
    """Raises ValueError for containers that are nested too deeply."""
    layer = [value]
    for _ in range(_MAX_DEPTH):
        layer = [each for container in layer for each in _inner(container)]
        if not layer:
            return
    raise ValueError("the header is nested too deeply")


def _inner(container: Any) -> Iterator[Any]:
    values = container.values() if isinstance(container, Mapping) else container
    return (each for each in values if isinstance(each, (Mapping, list, tuple)))
