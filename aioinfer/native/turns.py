"""Turns: of several processes that need the same file, one makes it, and the others wait for that."""

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

#: seconds between looks
_POLL = 0.05


@contextmanager
def turn(lock: Path, pulse: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold a file that only one process can hold, which is removed at the end. What is to be made may have
    been made before it was this one's turn.

    Where nothing can be written, or there are no locks, nobody waits. Raises what ``pulse`` raises, which is
    called while this waits. A process that is killed holds nothing.
    """
    opened = _take(lock, pulse)
    try:
        yield
    finally:
        if opened is not None:
            with suppress(OSError):
                lock.unlink()
            # A child that another thread has forked meanwhile would hold it by its copy.
            with suppress(OSError):
                fcntl.flock(opened, fcntl.LOCK_UN)
            os.close(opened)


def _take(lock: Path, pulse: Callable[[], None] | None) -> int | None:
    """The file, open and locked; None: nobody waits here."""
    waited = False
    while True:
        try:
            # Closed to other users, who could put files there.
            lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            opened = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(lock).st_ino == os.fstat(opened).st_ino:
                return opened
        except (BlockingIOError, FileNotFoundError):
            pass  # held, or removed by whoever has held it
        except OSError:
            os.close(opened)
            with suppress(OSError):
                lock.unlink()
            return None
        os.close(opened)
        if not waited:
            _log.info("another process makes what %s is for: waiting", lock)
        waited = True
        if pulse is not None:
            pulse()
        time.sleep(_POLL)
