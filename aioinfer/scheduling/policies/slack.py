"""Least slack first."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any, NamedTuple

from sortedcontainers import SortedDict

from aioinfer.scheduling.memory import Memory
from aioinfer.scheduling.policy import Policy
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.step_time import StepTime

__all__ = ["Slack"]

#: requests in front of a new one that are looked at; more of them are taken for as many alike
_LOOK = 256
#: outputs of about a length after which it is known how much of what they may have they use
_ENOUGH = 4
#: least share of an output in that
_NEWEST = 0.05
#: tokens of a request that tells how their time compares with that of steps, the bounds of what it tells, and
#: its share in it
_TELLING, _LEAST, _MOST, _STEADY = 8, 0.1, 10.0, 0.02
#: an idle engine learns nothing from what it refuses: each time, a request counts as this much shorter
_FORGIVEN = 0.98


class _Due(NamedTuple):
    """A request that waits and can be in time."""

    sequence: Sequence
    #: seconds of prefill that are left, and output tokens
    prefill: float
    tokens: float


class Slack(Policy):
    """Least slack first: what is left until a request's deadline, less the time that it needs itself.

    That order does not change with time: it is the one of the latest moments at which the requests may start.
    What waits beyond that moment is late whatever happens. It goes on with those that have no deadline, in
    the order of arrival and behind all that can be in time: a queue that is too long is not late as a whole,
    as it would be under earliest deadline first. The bound on waiting holds for all of them.
    """

    def __init__(self, memory: Memory, seed: int = 0) -> None:
        super().__init__(memory, seed)
        self._times = StepTime(0.0)
        self._slots = 1
        #: by latest start and place, and those without a deadline or too late, by their place
        self._due: SortedDict = SortedDict()
        self._others: SortedDict = SortedDict()
        #: the keys in the first of them, by request
        self._starts: dict[int, tuple[float, tuple[int, ...]]] = {}
        #: the requests that run, with what was expected of them; of one that was rewritten, no step: it did
        #: not begin when its output was admitted
        self._running: dict[int, tuple[Sequence, _Due, float | None]] = {}
        #: seconds of a token, as a multiple of those of a step: drafts and blocks have several in one
        self._pace = 1.0
        #: by the magnitude of what they may have: outputs that ended, and what share of that they used
        self._used: dict[int, tuple[int, float]] = {}
        self._forgiven = 1.0

    def plan_with(self, times: StepTime, slots: int) -> None:
        self._times, self._slots = times, slots

    # -- the queue ------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        if sequence.deadline is None:
            self._others[sequence.place] = sequence
        else:
            due = self._needs(sequence)
            start = (sequence.deadline - self._seconds(due), sequence.place)
            self._due[start] = due
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
        step = None
        if sequence.output.admitted_at is None:
            step = self._times.generating(*self._rows(sequence, len(self._running) + 1))
        self._running[sequence.key] = (sequence, self._needs(sequence), step)
        self._forgiven = 1.0

    def stopped(self, sequence: Sequence) -> None:
        _, needs, step = self._running.pop(sequence.key)
        began, tokens = sequence.output.admitted_at, len(sequence.output_ids) - sequence.output.resumed
        # What was parked for its reader has waited for that.
        steady = not sequence.recovery.retractions and sequence.request.max_lag is None
        if began is not None and step is not None and tokens >= _TELLING and steady:
            pace = (self._times.now - began - needs.prefill) / (tokens * step)
            self._pace += _STEADY * (min(max(_LEAST, pace), _MOST) - self._pace)
        possible = sequence.max_length - len(sequence.prompt_ids)
        if possible > 0:
            count, share = self._used.get(possible.bit_length(), (0, 1.0))
            used = len(sequence.output_ids) / possible
            if used < share and sequence.output.finish_reason not in ("stop", "length"):
                return  # it was cut short, or goes on later
            share += max(_NEWEST, 1 / (count + 2)) * (used - share)
            self._used[possible.bit_length()] = (count + 1, share)

    def order(self) -> Iterator[Sequence]:
        self._drop_late(self._times.now)
        return chain((each.sequence for each in self._due.values()), self._others.values())

    def rank(self, sequence: Sequence) -> Any:
        return self._starts.get(sequence.key)

    def _drop_late(self, now: float) -> None:
        due = self._due
        while due and due.peekitem(0)[0][0] < now:
            sequence = due.popitem(0)[1].sequence
            del self._starts[sequence.key]
            self._others[sequence.place] = sequence

    # -- estimates ------------------------------------------------------------------------------

    def late(self, sequence: Sequence, now: float) -> float:
        enough = self._used.get((sequence.max_length - len(sequence.prompt_ids)).bit_length(), (0, 1.0))[0]
        if sequence.deadline is None or not self._times.known or enough < _ENOUGH:
            return 0.0
        late = now + self._forgiven * self.needed(sequence, now) - sequence.deadline
        if late > 0 and not (self._running or len(self)):
            self._forgiven *= _FORGIVEN
        return max(0.0, late)

    def needed(self, sequence: Sequence, now: float) -> float:
        """Seconds from now until a new request would end, if none that comes later overtakes it."""
        self._drop_late(now)
        needs = self._needs(sequence)
        start = ((sequence.deadline or 0.0) - self._seconds(needs), sequence.place)
        ahead: int = self._due.bisect_left(start)
        looked: list[_Due] = [*islice(self._due.values(), min(ahead, _LOOK))]
        scale = ahead / len(looked) if looked else 1.0
        running = [self._needs(each) for each, *_ in self._running.values()]
        # Slots come free in the order of what their requests still generate.
        ends = [each.tokens for each in running] + [0.0] * (self._slots - len(running))
        heapq.heapify(ends)
        for each in looked:
            heapq.heapreplace(ends, ends[0] + each.tokens)
        prefill = sum(each.prefill for each in running) + scale * sum(each.prefill for each in looked)
        step = self._step(sequence, min(self._slots, len(running) + ahead + 1))
        # While slots come free, the prompts in front are computed.
        return max(prefill, scale * ends[0] * step) + needs.prefill + needs.tokens * step

    def _needs(self, sequence: Sequence) -> _Due:
        """What is left of a request, by what outputs like its own have used of what they may have."""
        cursor, length = sequence.cursor, sequence.length
        cached = length - self._memory.uncached(sequence) if not sequence.kv.slot else cursor.computed
        start = min(cached, length)
        possible = sequence.max_length - len(sequence.prompt_ids)
        share = self._used.get(possible.bit_length(), (0, 1.0))[1]
        return _Due(sequence, self._times.prefill(start, length - start), share * max(0, cursor.remaining))

    def _seconds(self, due: _Due) -> float:
        """What a request needs beside those that run. Nothing before steps were measured, and the order is
        that of the deadlines."""
        if not self._times.known:
            return 0.0
        return due.prefill + due.tokens * self._step(due.sequence, max(1, len(self._running)))

    def _step(self, sequence: Sequence, rows: int) -> float:
        """Seconds of a token in a step with so many rows like that of a request."""
        return self._pace * self._times.generating(*self._rows(sequence, rows))

    def _rows(self, sequence: Sequence, rows: int) -> tuple[float, float]:
        return rows, rows * (sequence.length + sequence.max_length) / 2
