"""VirtualLoop: an asyncio event loop whose clock jumps to the next timer instead of waiting for it."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable
from typing import Any

__all__ = ["Deadlock", "VirtualLoop"]


class Deadlock(RuntimeError):
    """Raised where nothing is ready to run and no timer is set: the program would wait for ever."""


class _JumpingSelector(selectors.DefaultSelector):
    """Advances the loop's clock by as much as the loop was willing to wait."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = super().select(0)
        if not events:
            self.loop._jump(timeout)
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    """Runs asyncio programs in virtual time, deterministically.

    Two runs of the same program with the same ``seed`` take exactly the same course. A program that can
    never go on raises :class:`Deadlock`, which makes every run a test of liveness too. Work given to an
    executor runs on the loop after a random virtual delay.

    With ``shuffle`` the callbacks that are ready at the same time run in random order, which is more
    than asyncio promises and finds code that leans on an order it was never given.
    """

    def __init__(self, seed: int = 0, *, shuffle: bool = False, executor_delay: float = 0.0) -> None:
        self._now = 0.0
        self._random = random.Random(seed)
        self._shuffle = shuffle
        self._executor_delay = executor_delay
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now

    def _jump(self, timeout: float | None) -> None:
        if timeout is None:
            raise Deadlock(f"nothing can happen any more at {self._now:.6f} s")
        if timeout > 0:
            self._now += timeout
        elif self._shuffle:
            ready = self._ready  # type: ignore[attr-defined]
            handles = list(ready)
            self._random.shuffle(handles)
            ready.clear()
            ready.extend(handles)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = self.create_future()

        def run() -> None:
            if future.done():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._random.uniform(0, self._executor_delay), run)
        return future
