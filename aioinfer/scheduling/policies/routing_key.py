"""Keep requests with the same routing key together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import chain

from sortedcontainers import SortedDict

from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import Policy
from aioinfer.scheduling.sequence import Sequence

__all__ = ["RoutingKey"]


class RoutingKey(Policy):
    """Requests whose routing key most of the running ones have, so that what they share stays warm."""

    def __init__(self, memory: Memory, seed: int = 0) -> None:
        super().__init__(memory, seed)
        self._running: Counter[str] = Counter()
        self._groups: dict[str, SortedDict] = {}

    def add(self, request: Sequence) -> None:
        super().add(request)
        if request.routing_key is not None:
            self._groups.setdefault(request.routing_key, SortedDict())[request.place] = request

    def remove(self, request: Sequence) -> None:
        super().remove(request)
        if request.routing_key is not None:
            group = self._groups[request.routing_key]
            del group[request.place]
            if not group:
                del self._groups[request.routing_key]

    def started(self, request: Sequence) -> None:
        if request.routing_key is not None:
            self._running[request.routing_key] += 1

    def stopped(self, request: Sequence) -> None:
        if request.routing_key is not None:
            self._running[request.routing_key] -= 1
            if not self._running[request.routing_key]:
                del self._running[request.routing_key]

    def rank(self, request: Sequence) -> str | None:
        return request.routing_key if request.routing_key in self._running else None

    def order(self) -> Iterator[Sequence]:
        waiting = [(-count, key) for key, count in self._running.items() if key in self._groups]
        favoured = {key for _, key in waiting}
        first = chain.from_iterable(self._groups[key].values() for _, key in sorted(waiting))
        return chain(first, (each for each in self if each.routing_key not in favoured))
