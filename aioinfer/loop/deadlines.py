"""Deadlines without an event loop: which requests are late is asked between steps."""

from __future__ import annotations

from collections.abc import Collection
from heapq import heapify, heappop, heappush
from typing import Literal

from aioinfer.errors import TimedOut

__all__ = ["Deadlines", "Phase"]

Phase = Literal["waiting", "running"]


class Deadlines:
    """The deadlines of the requests of an :class:`~aioinfer.LLM`, by key and phase."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        #: (time, key, phase, seconds); also of requests that have ended or gone on to the next phase
        self._heap: list[tuple[float, int, Phase, float]] = []

    def add(self, now: float, key: int, phase: Phase, seconds: float | None, known: Collection[int]) -> None:
        """The phase of a request begins and may last ``seconds``; ``known`` are the keys of open requests."""
        if seconds is None:
            return
        if len(self._heap) > 64 + 4 * len(known):
            self._heap = [entry for entry in self._heap if entry[1] in known]
            heapify(self._heap)
        heappush(self._heap, (now + seconds, key, phase, seconds))

    def passed(self, now: float) -> list[tuple[int, TimedOut]]:
        """The deadlines that have passed since the last call, with the error of each."""
        late = []
        while self._heap and self._heap[0][0] <= now:
            _, key, phase, seconds = heappop(self._heap)
            late.append((key, TimedOut(phase, seconds)))
        return late
