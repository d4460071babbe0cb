"""The clock of request metrics and of the driver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["clock_of"]

#: packages whose loops take their time from the system's monotonic clock; that of uvloop and winloop is cut
#: to milliseconds, and stands still within a turn of the loop
_REAL = ("asyncio", "uvloop", "winloop")


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """Seconds on the scale of ``loop.time()``, with the resolution of the system's clock.

    A loop with a ``time`` of its own is asked: virtual time, for example, stays exact.
    """
    if "time" in getattr(loop, "__dict__", ()):
        return loop.time
    owner = next((kind for kind in type(loop).__mro__ if "time" in vars(kind)), type(loop))
    return time.monotonic if owner.__module__.partition(".")[0] in _REAL else loop.time
