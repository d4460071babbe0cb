"""The machine's own speed: plain writing and reading of as many bytes, and files that are not in memory."""

from __future__ import annotations

import os
import time
from pathlib import Path

__all__ = ["drop", "plain_read", "plain_write", "size_of"]

_PIECE = 8 << 20


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files in a directory."""
    return sum(each.stat().st_size for each in _files(path))


def drop(path: Path) -> None:
    """Write files to the disk and take them out of the system's memory, as far as it has them there."""
    for each in _files(path):
        with each.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_write(path: Path, data: memoryview) -> float:
    """Seconds to write a new file, onto the disk as a session's file is."""
    path.unlink(missing_ok=True)
    start = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        at = 0
        while at < len(data):
            at += file.write(data[at : at + _PIECE])
        os.fsync(file.fileno())
    return time.perf_counter() - start


def plain_read(path: Path, into: memoryview) -> float:
    """Seconds to read a file into memory that is there already."""
    start = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        at = 0
        while at < len(into) and (count := file.readinto(into[at : at + _PIECE])):
            at += count
    return time.perf_counter() - start


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
