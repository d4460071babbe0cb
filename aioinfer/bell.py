"""Bell: many ring it, one task waits for it."""

from __future__ import annotations

import asyncio

__all__ = ["Bell"]


class Bell:
    """A wake-up that is never lost: ringing while nobody waits lets the next wait return at once.

    Unlike ``asyncio.Event`` it has one waiter and clears itself, so a wake-up costs one future.
    """

    __slots__ = ("_rung", "_waiter")

    def __init__(self) -> None:
        self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """Wake the waiter, or the next one. On the loop's thread only."""
        self._rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Return once rung since the last return."""
        if not self._rung:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._rung = False
