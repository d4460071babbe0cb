"""Longest prefix match first."""

from __future__ import annotations

from aioinfer.scheduling.policy import CacheAware
from aioinfer.scheduling.sequence import Sequence

__all__ = ["Lpm"]


class Lpm(CacheAware):
    """Longest prefix match first: the request that needs least computing, before its prefix is evicted."""

    def arrange(self) -> list[Sequence]:
        return sorted(self, key=lambda request: (-self.match(request), request.place))

    def match(self, request: Sequence) -> int:
        return self._memory.lookup(request)[0]
