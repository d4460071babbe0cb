"""Pace: long work on the loop, in slices."""

from __future__ import annotations

import asyncio
import time

__all__ = ["Pace"]

#: seconds of work between two turns of the loop
_SLICE = 0.001


class Pace:
    """Await it between the parts of long work: other callbacks run when the parts have taken 1 ms."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def __call__(self) -> None:
        if time.perf_counter() - self._since >= _SLICE:
            await asyncio.sleep(0)
            self._since = time.perf_counter()
