"""Turns: of several processes that need the same file, one makes it and the others wait."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aioinfer.native.trust import make_folder
from aioinfer.system.locks import lock_file, unlock

__all__ = ["turn"]

_log = logging.getLogger("aioinfer")

#: seconds between two attempts to take a lock
_POLL = 0.05
#: no file descriptor: another process holds the lock
_HELD = -1


@contextmanager
def turn(lock: Path, pulse: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock of a file, which is removed at the end. When the turn begins, another process may have
    made what is needed.

    Where nothing can be written, or there are no locks, no process waits. A process that is killed holds
    nothing. Raises what ``pulse`` raises, which is called while this waits.
    """
    opened = _take(lock)
    if opened == _HELD:
        _log.info("another process holds %s: waiting", lock)
    while opened == _HELD:
        if pulse is not None:
            pulse()
        time.sleep(_POLL)
        opened = _take(lock)
    try:
        yield
    finally:
        with suppress(OSError):
            lock.unlink()
        if opened is not None:
            # A child that another thread has forked meanwhile would hold the lock by its copy.
            unlock(opened)
            os.close(opened)


def _take(lock: Path) -> int | None:
    """The file, open and locked; _HELD: another process has it; None: there are no files or no locks here."""
    try:
        make_folder(lock.parent)
        return lock_file(lock)
    except BlockingIOError:
        return _HELD
    except OSError:
        return None
