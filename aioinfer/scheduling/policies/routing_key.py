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

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        if sequence.routing_key is not None:
            self._groups.setdefault(sequence.routing_key, SortedDict())[sequence.place] = sequence

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        if sequence.routing_key is not None:
            group = self._groups[sequence.routing_key]
            del group[sequence.place]
            if not group:
                del self._groups[sequence.routing_key]

    def started(self, sequence: Sequence) -> None:
        if sequence.routing_key is not None:
            self._running[sequence.routing_key] += 1

    def stopped(self, sequence: Sequence) -> None:
        if sequence.routing_key is not None:
            self._running[sequence.routing_key] -= 1
            if not self._running[sequence.routing_key]:
                del self._running[sequence.routing_key]

    def rank(self, sequence: Sequence) -> str | None:
        return sequence.routing_key if sequence.routing_key in self._running else None

    def order(self) -> Iterator[Sequence]:
        waiting = [(-count, key) for key, count in self._running.items() if key in self._groups]
        favoured = {key for _, key in waiting}
        first = chain.from_iterable(self._groups[key].values() for _, key in sorted(waiting))
        return chain(first, (each for each in self if each.routing_key not in favoured))
