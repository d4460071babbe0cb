"""Pace: long work on the loop in slices, and requests that arrive together a few at a time."""

from __future__ import annotations

import asyncio
import time
from collections import deque

__all__ = ["Arrivals", "Pace"]

#: seconds of work between two turns of the loop
_SLICE = 0.001
#: requests that begin in one turn of the loop; each takes about 0.5 ms of it (a core of a Xeon)
_AT_ONCE = 4


class Pace:
    """Await it between the parts of long work: other callbacks run when the parts have taken 1 ms."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def __call__(self) -> None:
        if time.perf_counter() - self._since >= _SLICE:
            await asyncio.sleep(0)
            self._since = time.perf_counter()


class Arrivals:
    """Await it when a request has arrived: a burst begins a few requests in each turn of the loop, in order.

    Between them the loop serves streams and checks of health, and notices clients that have left, whose
    requests then cost nothing.
    """

    __slots__ = ("_left", "_loop", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        #: requests that may begin in this turn
        self._left = _AT_ONCE
        #: that of the next turn
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            self._waiting.clear()  # those of a loop that is closed
            loop.call_soon(self._next_turn, loop)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._left = _AT_ONCE
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled otherwise
                turn.set_result(None)
                self._left -= 1
        if self._left < _AT_ONCE:
            loop.call_soon(self._next_turn, loop)
        else:
            self._loop = None
