"""Sockets: what the system knows of the other end."""

from __future__ import annotations

import os
import select
import socket
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["LONGEST_UNIX_PATH", "directory_for_sockets", "has_unix_sockets", "hung_up"]

#: bytes of the longest path of a Unix socket, of the systems that there are
LONGEST_UNIX_PATH = 103
#: those of what is random in the name of a directory, of a socket's name, and of the slashes before both
_NAMES = 16


def has_unix_sockets() -> bool:
    """Whether sockets can have a path."""
    return hasattr(socket, "AF_UNIX")


def directory_for_sockets(prefix: str) -> Path:
    """A new directory that only this user can enter, where the paths of sockets with short names are short
    enough. Raises OSError."""
    usual = tempfile.gettempdir()
    left = LONGEST_UNIX_PATH - len(os.fsencode(usual)) - len(prefix)
    return Path(tempfile.mkdtemp(prefix=prefix, dir=usual if left >= _NAMES else "/tmp"))


def hung_up(connection: Any) -> bool:
    """Whether the peer of a connected socket has closed it or will send nothing more, whatever is unread.

    False where the system does not tell that apart from data. Raises OSError, and ValueError: it is closed.
    """
    if hasattr(select, "POLLRDHUP"):
        poll = select.poll()
        poll.register(connection, select.POLLRDHUP)  # errors are told in any case
        return bool(poll.poll(0))
    if hasattr(select, "kqueue"):  # macOS, and other systems from BSD
        return _kqueue_eof(connection.fileno())
    return False


def _kqueue_eof(descriptor: int) -> bool:
    kernel: Any = select  # mypy knows the names of the system that it runs on
    with_end = kernel.kevent(descriptor, kernel.KQ_FILTER_READ, kernel.KQ_EV_ADD)
    queue = kernel.kqueue()
    try:
        # What is no open file is an event with an error.
        ended = kernel.KQ_EV_EOF | kernel.KQ_EV_ERROR
        return any(event.flags & ended for event in queue.control([with_end], 1, 0))
    finally:
        queue.close()
