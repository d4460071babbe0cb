"""Turns: of several processes that need the same file, one makes it and the others wait."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["turn"]

_log = logging.getLogger("aioinfer")

#: seconds between two attempts to take a lock
_POLL = 0.05


@contextmanager
def turn(lock: Path, pulse: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a file, which is removed at the end. When the turn begins, another process may have
    made what is needed; two that come just as it is removed may both have the turn, and do the work twice.

    Where nothing can be written, or there are no locks, no process waits. A process that is killed holds
    nothing. Raises what ``pulse`` raises, which is called while this waits.
    """
    try:
        # Closed to other users, who could put files there.
        lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        opened = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        yield
        return
    try:
        if not _taken(opened):
            _log.info("another process holds %s: waiting", lock)
            while not _taken(opened):
                if pulse is not None:
                    pulse()
                time.sleep(_POLL)
        try:
            yield
        finally:
            with suppress(OSError):
                lock.unlink()
    finally:
        # A child that another thread has forked meanwhile would hold the lock by its copy.
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_UN)
        os.close(opened)


def _taken(opened: int) -> bool:
    """Whether this process has the lock now, or there are no locks."""
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
