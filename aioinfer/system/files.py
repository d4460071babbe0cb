"""Files: limits, files in memory, and files that are about to be read."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import BinaryIO

__all__ = ["file_limit", "memory_file", "open_at_once", "open_files", "will_be_read"]

#: directories with an entry for each open file of this process: of Linux, and of macOS
_OPEN = ("/proc/self/fd", "/dev/fd")

#: neither waiting for the other end of a pipe nor, on Windows, changing the ends of lines
_AT_ONCE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def open_at_once(path: str | os.PathLike[str]) -> int:
    """The descriptor of a file for reading; of a pipe, too, without waiting for a writer. Raises OSError."""
    return os.open(path, _AT_ONCE)


def file_limit() -> int | None:
    """Files that this process may have open at once; None: any number, or the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return None if limit == resource.RLIM_INFINITY else limit


def open_files() -> int | None:
    """Files that this process has open, this question's own included. None where the system does not say."""
    for place in _OPEN:
        with suppress(OSError):
            return len(os.listdir(place))
    return None


def memory_file(name: str) -> BinaryIO:
    """A file that no other process can change: in memory where the system has such files, elsewhere one
    without a name. ``/dev/fd`` and its descriptor are its path."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(name), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def will_be_read(descriptor: int) -> None:
    """Have the system read a file in the background, all of it and in large pieces: what is mapped is
    otherwise read page by page, as it is touched. Nothing where the system cannot."""
    with suppress(OSError):
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
