"""Least slack first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from sortedcontainers import SortedDict

from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import Estimates, Policy
from aioinfer.scheduling.sequence import Sequence

__all__ = ["Slack"]


class Slack(Policy):
    """Least slack first: what is left until a request's deadline, less the time that it needs itself.

    That order does not change with time: it is the one of the latest moments at which the requests may start.
    What waits beyond that moment is late whatever happens. It goes on with those that have no deadline, in
    the order of arrival and behind all that can be in time: a queue that is too long is not late as a whole,
    as it would be under earliest deadline first. The bound on waiting holds for all of them.
    """

    def __init__(self, memory: Memory, seed: int = 0) -> None:
        super().__init__(memory, seed)
        self._estimates: Estimates | None = None
        #: by latest start and place, and those without a deadline or too late, by their place
        self._due: SortedDict = SortedDict()
        self._others: SortedDict = SortedDict()
        #: the keys in the first of them, by request
        self._starts: dict[int, tuple[float, tuple[int, ...]]] = {}
        self._running = 0

    def plan_with(self, estimates: Estimates) -> None:
        self._estimates = estimates

    # -- the queue ------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        if sequence.deadline is None:
            self._others[sequence.place] = sequence
        else:
            start = self._latest_start(sequence, sequence.deadline)
            self._due[start] = sequence
            self._starts[sequence.key] = start
        super().add(sequence)

    def remove(self, sequence: Sequence) -> None:
        start = self._starts.pop(sequence.key, None)
        if start is None:
            del self._others[sequence.place]
        else:
            del self._due[start]
        super().remove(sequence)

    def started(self, sequence: Sequence) -> None:
        self._running += 1

    def stopped(self, sequence: Sequence) -> None:
        self._running -= 1

    def order(self) -> Iterator[Sequence]:
        self._drop_late()
        return chain(self._due.values(), self._others.values())

    def ahead(self, sequence: Sequence) -> int:
        self._drop_late()
        if sequence.deadline is not None:
            start = self._latest_start(sequence, sequence.deadline)
            if start[0] >= self._now:
                return int(self._due.bisect_left(start))
        return len(self._due) + int(self._others.bisect_left(sequence.place))

    def rank(self, sequence: Sequence) -> Any:
        return self._starts.get(sequence.key)

    @property
    def _now(self) -> float:
        return 0.0 if self._estimates is None else self._estimates.times.now

    def _latest_start(self, sequence: Sequence, deadline: float) -> tuple[float, tuple[int, ...]]:
        alone = 0.0 if self._estimates is None else self._estimates.alone(sequence, max(1, self._running))
        return deadline - alone, sequence.place

    def _drop_late(self) -> None:
        due, now = self._due, self._now
        while due and due.peekitem(0)[0][0] < now:
            sequence = due.popitem(0)[1]
            del self._starts[sequence.key]
            self._others[sequence.place] = sequence
