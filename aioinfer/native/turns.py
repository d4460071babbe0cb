"""Turns: of several processes that need the same file, one makes it, and the others wait for that."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

__all__ = ["turn"]

#: seconds between looks
_POLL = 0.05


@contextmanager
def turn(lock: Path, pulse: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold a file that only one process can hold, which is removed at the end. Yields whether another one has
    held it before: what is to be made may be there now.

    Where nothing can be written, or there are no locks, nobody waits. Raises what ``pulse`` raises, which is
    called while this waits. A process that is killed holds nothing.
    """
    waited = False
    with ExitStack() as held:
        with suppress(OSError):
            # Closed to other users, who could put files there.
            lock.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file = held.enter_context(lock.open("ab"))
            while not _locked(file):
                waited = True
                if pulse is not None:
                    pulse()
                time.sleep(_POLL)
            held.callback(lambda: lock.unlink(missing_ok=True))
        yield waited


def _locked(file: IO[bytes]) -> bool:
    """Whether this could be locked, until it is closed. Raises OSError if there are no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
