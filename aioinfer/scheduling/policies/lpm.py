"""Longest prefix match first."""

from __future__ import annotations

from aioinfer.scheduling.policy import CacheAware
from aioinfer.scheduling.sequence import Sequence

__all__ = ["Lpm"]


class Lpm(CacheAware):
    """Longest prefix match first: the request that needs least computing, before its prefix is evicted."""

    def arrange(self) -> list[Sequence]:
        return sorted(self, key=lambda sequence: (-self.match(sequence), sequence.place))

    def match(self, sequence: Sequence) -> int:
        return self._memory.lookup(sequence)[0]
