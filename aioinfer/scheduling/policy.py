"""Policies: the waiting requests, and in which order they would be admitted.

One small class each; :data:`POLICIES` finds them by name. To add one, write a class here and list it.
Every operation costs O(log n) in the number of waiting requests, but for the two cache-aware policies,
which sort, and which fall back to first come, first served when many wait (as in SGLang).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from typing import Any, ClassVar

from sortedcontainers import SortedDict

from aioinfer.cache.radix import Node
from aioinfer.request import Request
from aioinfer.scheduling.memory import Memory

__all__ = ["POLICIES", "DfsWeight", "Fcfs", "Lof", "Lpm", "Policy", "Priority", "RandomOrder", "RoutingKey"]

#: more waiting requests than this are not sorted by what the cache holds
SORT_LIMIT = 128


class Policy:
    """The queue itself, in the order of arrival. Subclasses change :meth:`order`.

    The scheduler tells of arrivals, departures and admissions; a retracted request arrives again and
    keeps its age.
    """

    name: ClassVar[str]

    def __init__(self, memory: Memory, seed: int = 0) -> None:
        self._memory = memory
        self._arrivals: SortedDict = SortedDict()
        #: rounds in which a cache-aware policy found too many waiting to sort them
        self.fallbacks = 0

    def add(self, request: Request) -> None:
        """A new request, or a retracted one that waits again."""
        self._arrivals[request.key] = request

    def remove(self, request: Request) -> None:
        """It was admitted or has ended."""
        del self._arrivals[request.key]

    def started(self, request: Request) -> None:
        """It holds a slot now."""

    def stopped(self, request: Request) -> None:
        """It holds its slot no longer."""

    def order(self) -> Iterator[Request]:
        """The order of admission; lazy, and void once the queue changes."""
        return iter(self._arrivals.values())

    def eldest(self) -> Request | None:
        """Who has waited longest, and goes first once it was passed over too often."""
        return self._arrivals.peekitem(0)[1] if self._arrivals else None

    def __contains__(self, request: Request) -> bool:
        return request.key in self._arrivals

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Request]:
        """In the order of arrival."""
        return iter(self._arrivals.values())


class Fcfs(Policy):
    """First come, first served."""

    name = "fcfs"


class _Ranked(Policy):
    """Ordered by a rank that does not change while a request waits; then by arrival."""

    def __init__(self, memory: Memory, seed: int = 0) -> None:
        super().__init__(memory, seed)
        self._seed = seed
        self._ranked: SortedDict = SortedDict()
        self._ranks: dict[int, Any] = {}

    def rank(self, request: Request) -> Any:
        """Smaller goes first."""
        raise NotImplementedError

    def add(self, request: Request) -> None:
        super().add(request)
        rank = self._ranks[request.key] = (self.rank(request), request.key)
        self._ranked[rank] = request

    def remove(self, request: Request) -> None:
        super().remove(request)
        del self._ranked[self._ranks.pop(request.key)]

    def order(self) -> Iterator[Request]:
        return iter(self._ranked.values())


class Lof(_Ranked):
    """Longest output first: long ones start early, so that a batch of jobs ends together."""

    name = "lof"

    def rank(self, request: Request) -> int:
        return request.length - request.max_length


class RandomOrder(_Ranked):
    """A lottery; the same seed draws the same order."""

    name = "random"

    def rank(self, request: Request) -> bytes:
        return hashlib.blake2b(b"%d %d" % (self._seed, request.key), digest_size=8).digest()


class Priority(_Ranked):
    """Larger ``priority`` first. Strictly: a lower one waits for as long as higher ones come."""

    name = "priority"

    def rank(self, request: Request) -> int:
        return -request.priority

    def eldest(self) -> Request | None:
        """Of those with the largest priority only: never before a more important one."""
        return self._ranked.peekitem(0)[1] if self._ranked else None


class RoutingKey(Policy):
    """Requests whose routing key most of the running ones have, so that what they share stays warm."""

    name = "routing-key"

    def __init__(self, memory: Memory, seed: int = 0) -> None:
        super().__init__(memory, seed)
        self._running: Counter[str] = Counter()
        self._groups: dict[str, SortedDict] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        if request.routing_key is not None:
            self._groups.setdefault(request.routing_key, SortedDict())[request.key] = request

    def remove(self, request: Request) -> None:
        super().remove(request)
        if request.routing_key is not None:
            group = self._groups[request.routing_key]
            del group[request.key]
            if not group:
                del self._groups[request.routing_key]

    def started(self, request: Request) -> None:
        if request.routing_key is not None:
            self._running[request.routing_key] += 1

    def stopped(self, request: Request) -> None:
        if request.routing_key is not None:
            self._running[request.routing_key] -= 1
            if not self._running[request.routing_key]:
                del self._running[request.routing_key]

    def order(self) -> Iterator[Request]:
        waiting = [(-count, key) for key, count in self._running.items() if key in self._groups]
        favoured = {key for _, key in waiting}
        first = chain.from_iterable(self._groups[key].values() for _, key in sorted(waiting))
        return chain(first, (each for each in self if each.routing_key not in favoured))


class _CacheAware(Policy):
    """Sorted by what the cache holds now; by arrival while more than ``SORT_LIMIT`` wait."""

    def __init__(self, memory: Memory, seed: int = 0) -> None:
        super().__init__(memory, seed)
        self._sorted: list[Request] = []
        self._sorted_for: tuple[int, int] | None = None
        self._changes = 0

    def add(self, request: Request) -> None:
        super().add(request)
        self._changes += 1

    def remove(self, request: Request) -> None:
        super().remove(request)
        self._changes += 1

    def order(self) -> Iterator[Request]:
        if len(self) > SORT_LIMIT:
            self.fallbacks += 1
            return iter(self)
        tree = self._memory.tree
        now = (self._changes, 0 if tree is None else tree.version)
        if self._sorted_for != now:
            self._sorted, self._sorted_for = self.arrange(), now
        return iter(self._sorted)

    def arrange(self) -> list[Request]:
        """All waiting requests in the order of admission."""
        raise NotImplementedError


class Lpm(_CacheAware):
    """Longest prefix match first: who needs least computing, before its prefix is evicted."""

    name = "lpm"

    def arrange(self) -> list[Request]:
        return sorted(self, key=lambda request: (-self._memory.lookup(request)[0], request.key))


class DfsWeight(_CacheAware):
    """Depth first through the tree of prefixes, branches with most waiting requests first, so that those
    that share a prefix follow each other."""

    name = "dfs-weight"

    def arrange(self) -> list[Request]:
        at: dict[Node | None, list[Request]] = {}
        weight: Counter[Node] = Counter()
        below: dict[Node | None, dict[Node, None]] = {}
        for request in self:
            node = self._memory.lookup(request)[1]
            at.setdefault(node, []).append(request)
            while node is not None:
                weight[node] += 1
                below.setdefault(node.parent, {})[node] = None
                node = node.parent
        arranged: list[Request] = []
        stack: list[Node | None] = [None]
        while stack:
            here = stack.pop()
            arranged += at.get(here, [])
            # The heaviest comes last onto the stack and first off it; among equals who was met first.
            branches = list(below.get(here, {}))[::-1]
            branches.sort(key=weight.__getitem__)
            stack += branches
        return arranged


POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Fcfs, Lpm, DfsWeight, Lof, RandomOrder, RoutingKey, Priority)
}
