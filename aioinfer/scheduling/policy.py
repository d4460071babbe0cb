"""Policies: the waiting requests, and the order in which they are admitted.

This file holds the three bases: :class:`Policy` (order of arrival), :class:`Ranked` (a fixed rank per
request) and :class:`CacheAware` (sorted by what the prefix cache holds). A policy of the package is one file
in ``policies``: ``dfs_weight.py`` is the policy ``dfs-weight`` and defines the class ``DfsWeight``. One of an
application is the class itself, in ``EngineConfig.policy``.

Every operation costs O(log n) in the number of waiting requests, except for the cache-aware policies,
which sort, and which fall back to first come, first served beyond ``SORT_LIMIT`` (as SGLang does).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, Self

from sortedcontainers import SortedDict

from aioinfer import plugins
from aioinfer.config.values import shown
from aioinfer.errors import ConfigError
from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from aioinfer.scheduling.step_time import StepTime

__all__ = ["CacheAware", "Estimates", "Policy", "Ranked", "make_policy", "policy_class"]

#: with more waiting requests than this, cache-aware policies do not sort
SORT_LIMIT = 128


def policy_class(policy: str | type) -> type[Policy]:
    """The policy that a config names, or is given. Raises KeyError for an unknown name, and ConfigError for
    a class that is no policy, or an abstract one."""
    if isinstance(policy, str):
        found: type[Policy] = plugins.load(plugins.POLICIES, policy.replace("-", "_"))
        return found
    if not issubclass(policy, Policy):
        raise ConfigError(f"policy must be a subclass of {Policy.__module__}.Policy, got {shown(policy)}")
    if inspect.isabstract(policy):
        lacks = ", ".join(sorted(getattr(policy, "__abstractmethods__", ())))
        raise ConfigError(f"the policy {policy.__name__} is abstract: it lacks {lacks}")
    return policy


def make_policy(policy: str | type, memory: Memory, seed: int) -> Policy:
    """An empty queue. Raises as :func:`policy_class`, and ConfigError if the constructor raises."""
    cls = policy_class(policy)
    try:
        return cls(memory, seed)
    except Exception as error:
        raise ConfigError(f"the policy {cls.__name__} could not be made: {error!r}") from error


class PolicyFailed(Exception):
    """The queue policy raised; ``__cause__`` is what it raised."""

    @classmethod
    def because(cls, policy: Policy, error: Exception) -> Self:
        failed = cls(f"the queue policy {policy.name} raised {error!r}")
        failed.__cause__ = error
        return failed


class Estimates(Protocol):
    """What requests take: of :class:`~aioinfer.scheduling.forecast.Forecast`."""

    times: StepTime

    def alone(self, sequence: Sequence, rows: int) -> float:
        """Seconds that a request needs in one of ``rows`` slots that are taken; 0: not known."""


class Policy:
    """The queue itself, in the order of :attr:`Sequence.place`: that of arrival, but for ``queue_behind``.
    Subclasses change :meth:`order`.

    The scheduler tells of arrivals, departures and admissions; a retracted request arrives again and
    keeps its age.
    """

    def __init__(self, memory: Memory, seed: int = 0) -> None:
        self._memory = memory
        self._arrivals: SortedDict = SortedDict()
        #: rounds in which a cache-aware policy found too many waiting to sort them
        self.fallbacks = 0

    def plan_with(self, estimates: Estimates) -> None:
        """Called once, with what requests take, as that is learned."""

    def ahead(self, sequence: Sequence) -> int:
        """How many of those that wait, the first of :meth:`order`, go before a new request: what is promised
        to it follows from them. By default those that arrived before."""
        return int(self._arrivals.bisect_left(sequence.place))

    @property
    def name(self) -> str:
        """As a config calls it: DfsWeight is ``dfs-weight``."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", type(self).__name__).lower()

    def add(self, sequence: Sequence) -> None:
        """A new request, or a retracted one that waits again."""
        self._arrivals[sequence.place] = sequence

    def remove(self, sequence: Sequence) -> None:
        """It was admitted or has ended."""
        del self._arrivals[sequence.place]

    def started(self, sequence: Sequence) -> None:
        """It holds a slot now."""

    def stopped(self, sequence: Sequence) -> None:
        """It holds its slot no longer."""

    def order(self) -> Iterator[Sequence]:
        """The order of admission; lazy, and void once the queue changes."""
        return iter(self._arrivals.values())

    def rank(self, sequence: Sequence) -> Any:
        """Requests of equal rank follow each other, and packing may change their order. A policy that does
        not say which are equal is obeyed to the letter."""
        return sequence.key

    def eldest(self) -> Sequence | None:
        """The request that has waited longest; it goes first once it was passed over too often."""
        return self._arrivals.peekitem(0)[1] if self._arrivals else None

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.place in self._arrivals

    def __len__(self) -> int:
        return len(self._arrivals)

    def __iter__(self) -> Iterator[Sequence]:
        """In the order of arrival."""
        return iter(self._arrivals.values())


class Ranked(Policy):
    """Ordered by a rank that does not change while a request waits; then by arrival."""

    def __init__(self, memory: Memory, seed: int = 0) -> None:
        super().__init__(memory, seed)
        self._seed = seed
        self._ranked: SortedDict = SortedDict()
        self._ranks: dict[int, Any] = {}

    def rank(self, sequence: Sequence) -> Any:
        """Smaller goes first; equals in the order of arrival."""
        raise NotImplementedError

    def add(self, sequence: Sequence) -> None:
        # What may raise comes first: a rank that cannot be computed or compared leaves the queue as it was.
        rank = (self.rank(sequence), sequence.place)
        self._ranked[rank] = sequence
        self._ranks[sequence.key] = rank
        super().add(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self._ranked[self._ranks.pop(sequence.key)]
        super().remove(sequence)

    def order(self) -> Iterator[Sequence]:
        return iter(self._ranked.values())

    def ahead(self, sequence: Sequence) -> int:
        return int(self._ranked.bisect_left((self.rank(sequence), sequence.place)))


class CacheAware(Policy):
    """Sorted by what the cache holds now; by arrival while more than ``SORT_LIMIT`` wait."""

    def __init__(self, memory: Memory, seed: int = 0) -> None:
        super().__init__(memory, seed)
        self._sorted: list[Sequence] = []
        self._sorted_for: tuple[int, int] | None = None
        self._changes = 0
        self._by_arrival = False

    def add(self, sequence: Sequence) -> None:
        super().add(sequence)
        self._changes += 1

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._changes += 1

    def order(self) -> Iterator[Sequence]:
        self._by_arrival = len(self) > SORT_LIMIT
        if self._by_arrival:
            self.fallbacks += 1
            return iter(self)
        tree = self._memory.tree
        now = (self._changes, 0 if tree is None else tree.version)
        if self._sorted_for != now:
            self._sorted, self._sorted_for = self.arrange(), now
        return iter(self._sorted)

    def rank(self, sequence: Sequence) -> Any:
        return None if self._by_arrival else self.match(sequence)

    def match(self, sequence: Sequence) -> Any:
        """A value that is equal for requests of equal rank. All are equal that are not sorted."""
        return sequence.key

    def arrange(self) -> list[Sequence]:
        """All waiting requests in the order of admission."""
        raise NotImplementedError
