"""Locks: a file that one process holds at a time, and that nobody holds when the process has ended.

They are those of flock(2): of an open file, also across its copies in children of a fork, and advisory.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["lock", "lock_file", "unlock"]

_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)


def lock(descriptor: int) -> None:
    """Take the lock of an open file. Raises BlockingIOError: another one has it; another OSError: this file
    system, or this system, has no locks."""
    if fcntl is None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    """Release a lock, also where the copy of a child holds the file open."""
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def lock_file(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> int:
    """The descriptor of a file that is made if there is none, open and locked; a link is not followed.
    ``path`` is relative to ``dir_fd``, an open directory, if that is given.

    Its holder may remove it: who has opened it before that gets the lock of a file that is no longer there,
    and opens it again. Raises BlockingIOError: another process has the lock; and OSError.
    """
    while True:
        opened = os.open(path, _FLAGS, 0o600, dir_fd=dir_fd)
        try:
            lock(opened)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(opened), os.lstat(path, dir_fd=dir_fd)):
                    return opened
        except BaseException:
            os.close(opened)
            raise
        os.close(opened)
