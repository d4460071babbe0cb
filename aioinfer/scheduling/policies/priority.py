"""Strict priorities."""

from __future__ import annotations

from aioinfer.scheduling.policy import Ranked
from aioinfer.scheduling.sequence import Sequence

__all__ = ["Priority"]


class Priority(Ranked):
    """Larger ``priority`` first. Strictly: a lower one waits for as long as higher ones come."""

    def rank(self, sequence: Sequence) -> int:
        return -sequence.priority

    def eldest(self) -> Sequence | None:
        """The eldest of those with the largest priority: never before a more important one."""
        return self._ranked.peekitem(0)[1] if self._ranked else None
