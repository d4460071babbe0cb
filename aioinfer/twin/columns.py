"""ColumnLauncher: decode steps between two events, all at once.

A batch that only decodes does the same in each step until a request ends or another one comes. Its steps
differ by the positions that they read, so their times follow from each other by a few sums, and what they
leave behind in scheduler and outputs can be written in one go. An engine with such a *column* under way is
told by :meth:`ColumnLauncher.catch_up` before anything touches it: the steps that have been read by then are
made good, the last of them at its own moment. So every figure is the one of the exact mode::

    exact     read, plan │ read, plan │ read, plan │ read, plan │ read, plan (a request ends)
    columns   ├────────────────────── skipped ─────────────────┤ read, plan
                             ▲ a request comes: catch up to here
"""

from __future__ import annotations

import copy
import dataclasses
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from aioinfer.scheduling.costs import Sizes
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.token_batch import TokenBatch
from aioinfer.testing.virtual_time import VirtualLoop
from aioinfer.twin.device import TwinLauncher
from aioinfer.twin.load import ANSWER

if TYPE_CHECKING:
    import asyncio

    from aioinfer.scheduling.step import Step

__all__ = ["ColumnLauncher"]

#: steps that are worth a column, and at most in one
_FEW, _MOST = 3, 128


@dataclasses.dataclass(slots=True)
class _Column:
    """Steps by their number: 0 and 1 are in flight when it begins. ``reads`` is shorter than the others: it
    ends with the step whose reading is the next event."""

    launched: list[float]
    begins: list[float]
    ends: list[float]
    #: when they are noticed
    dues: list[float]
    #: when they are read, and until when the host is busy before that
    reads: list[float]
    hosts: list[float]
    #: the step behind it was not planned until then
    late: list[bool]
    due: asyncio.TimerHandle | None = None


class ColumnLauncher(TwinLauncher):
    """A TwinLauncher that skips steps."""

    _column: _Column | None = None

    def catch_up(self) -> None:
        """As in TwinLauncher: make good what has happened by now."""
        if self._column is None or self.runtime is None:
            return
        now, reads, driver = self._loop.time(), self._column.reads, self.runtime.driver
        count = bisect_right(reads, now) - 1
        self._skip(count)
        self._at(reads[count], self._settle)
        timer = driver._timer
        if timer is not None and timer.when() <= now:
            timer.cancel()
            self._at(timer.when(), driver._put_off_no_longer)

    def _at(self, when: float, call: Callable[[], None]) -> None:
        """Make a call as of a moment that has passed."""
        loop = self._loop
        assert isinstance(loop, VirtualLoop)
        now, loop._now = loop._now, when
        try:
            call()
        finally:
            loop._now = now

    def _read(self) -> None:
        """Begin a column with the step that has ended, or settle it."""
        count = self._steps()
        if count < _FEW:
            self._settle()
            return
        timer = self.flights[1][2]
        assert timer is not None
        timer.cancel()
        self._column = column = self._foreseen(count)
        last = len(column.reads) - 1
        column.due = self._loop.call_at(column.reads[last], self._over, last)

    def _over(self, count: int) -> None:
        self._skip(count)
        self._settle()

    def _steps(self) -> int:
        """The number of steps that can be skipped now: none ends a request or has another one beside it."""
        runtime = self.runtime
        if runtime is None or len(self.flights) != 2 or runtime.driver._timer is not None:
            return 0
        scheduler, texts, driver = runtime.core.scheduler, runtime.core.texts, runtime.driver
        config, queues, memory, batch = (
            scheduler.config,
            scheduler.queues,
            scheduler.memory,
            scheduler.queues.batch,
        )
        rows = len(batch)
        if not isinstance(batch, TokenBatch) or not rows or queues.prefilling or queues.arriving:
            return 0
        full = len(queues.running) >= config.running_requests and not config.preemption
        if (queues.waiting and not full) or queues.shelved or texts.behind or memory.pages.fenced:
            return 0
        if any(each.consumer.timer is not None for each in batch.sequences):
            return 0  # a running timeout may end it meanwhile
        if driver.paused or driver._holds or driver._pace is None or config.max_decode_rows is not None:
            return 0
        for handle, *_ in self.flights:
            step = handle.step
            other = step.prefilling or step.generating.ending or step.encoding is not None
            if other or len(step.generating) != rows:
                return 0
        shortest = self._step.seconds(Sizes(rows)) * self._noise.least
        if self._notice.most + self._host.plan[0] + self._host.read[0] > shortest:
            return 0  # steps may be read when the next one has ended: one by one
        count = min(_MOST, int((batch.limit[:rows] - batch.computed[:rows]).min()) - 2)
        while count >= _FEW and len(_pages(batch, count)) > memory.pages.free + memory.evictable:
            count //= 2
        return count

    def _foreseen(self, count: int) -> _Column:
        """What driver, pace and host would do in so many steps, as in ``Driver._turn``."""
        assert self.runtime is not None
        (oldest, first, _), (newest, second, _) = self.flights
        step, rows, number = oldest.step, len(oldest.step.generating), oldest.step.id
        pace = copy.copy(self.runtime.driver._pace)
        assert pace is not None
        pace._seconds = dict(pace._seconds)
        (fixed, row), (also, each) = self._host.plan, self._host.read
        plan, read = fixed + row * rows, also + each * rows
        base, alone, per, *_ = self._step.parts(Sizes(rows, 1.0))
        positions = float(newest.step.generating.starts.sum()) + rows * np.arange(-1.0, count + 1)
        seconds = ((base + alone + per * positions) * self._noise.range(number, number + count + 2)).tolist()
        notices = self._notice.range(number, number + count + 1).tolist()
        found = _Column(
            *([oldest.launched_at, newest.launched_at], [first, first], [first, second]),
            [0.0, self.due],
            *([self._loop.time()], [self.host_until], [False]),
        )
        launched, begins, ends = found.launched, found.begins, found.ends
        for at in range(1, count + 1):
            now = found.reads[-1]
            host = now + read
            if found.late[-1]:
                host += plan
                launched.append(now)
                begins.append(self._begins(host, ends[at - 1]))
                ends.append(begins[at] + seconds[at])
            pace.landed(step, launched[at - 1], now, now - ends[at - 1])
            planned = now + pace.spare(step, launched[at], now)
            if at > 1:
                found.dues.append(max(found.dues[-1], ends[at] + notices[at]))
            noticed = found.dues[at]
            late = planned > max(noticed, host)
            if not late:
                host = max(host, planned) + plan
                launched.append(planned)
                begins.append(self._begins(host, ends[at]))
                ends.append(begins[at + 1] + seconds[at + 1])
            found.late.append(late)
            found.reads.append(max(noticed, host))
            found.hosts.append(host)
        return found

    def _skip(self, count: int) -> None:
        """End the column just before the step ``count`` is read."""
        column, self._column = self._column, None
        assert column is not None
        assert column.due is not None
        assert self.runtime is not None
        column.due.cancel()
        (oldest, *_), (newest, *_) = self.flights
        last = count if column.late[count] else count + 1
        self.flights.clear()
        self.flights.append((oldest, column.ends[count], None))
        if last == count:
            self.runtime.driver._flights.remove(newest)
            self.due = column.dues[count]
        else:
            notice = self._notice.of(oldest.step.id + last)
            self.due = max(column.dues[count], column.ends[last] + notice) if last > 1 else self.due
            self.flights.append((newest, column.ends[last], self._loop.call_at(self.due, self._land)))
        self.device_until, self.host_until = column.ends[last], column.hosts[count]
        for at in range(2, last + 1):
            self.busy += column.ends[at] - column.begins[at]
            if self._trace is not None:
                span = column.begins[at], column.ends[at]
                self._trace.step(self._number, "forward", oldest.step.id + at, *span, oldest.step.num_tokens)
        rows = oldest.step.generating
        read = float(rows.starts.sum()) + last * len(rows)
        self.largest = self.largest._replace(context=max(self.largest.context, read))
        if count:
            self._advance(column, count, last - 1)
            for handle, at in ((oldest, count), (newest, last)):
                handle.step = _later(handle.step, count)
                handle.launched_at = column.launched[at]

    def _advance(self, column: _Column, read: int, planned: int) -> None:
        """Leave behind what so many steps leave that were read, and that were planned."""
        assert self.runtime is not None
        oldest, core, driver = self.flights[0][0], self.runtime.core, self.runtime.driver
        scheduler, batch, queues = core.scheduler, core.scheduler.queues.batch, core.scheduler.queues
        assert isinstance(batch, TokenBatch)
        rows, step, times = len(batch), oldest.step, column.reads[:read]
        for sequence in batch.sequences:
            sequence.output_ids += [ANSWER] * read
            sequence.output.token_times += times
        core.texts.output_tokens += read * rows
        for _, _, sequence in _pages(batch, planned):
            scheduler.memory.grow(sequence)
            batch.changed_pages(sequence)
        batch.computed[:rows] += planned
        context, before = float(step.generating.starts.sum()), driver._last_progress
        for begun, now, end in zip(column.launched, times, column.ends, strict=False):
            assert driver._pace is not None
            driver._pace.landed(step, begun, now, now - end)
            scheduler.times.note(Sizes(rows, context), now - max(before, begun))
            before, context = now, context + rows
        for _ in range(planned):
            scheduler.ratio.decay()
        self.skipped += planned
        scheduler.memory.resolved(step.id + read - 1)
        driver._last_progress = scheduler.times.now = times[-1]
        queues.counters.steps += planned
        queues.counters.decode_tokens += planned * rows
        for number in range(queues.last_step + max(1, planned - 3), queues.last_step + planned + 1):
            scheduler.forecast.planned(dataclasses.replace(step, id=number), 0)  # which keeps the newest
        queues.last_step = batch.last_step = queues.last_step + planned
        core._newest_step = scheduler._newest_rows = queues.last_step


def _pages(batch: TokenBatch, steps: int) -> list[tuple[int, int, Sequence]]:
    """Pages that are taken in so many steps: step, key, and request, in the order in which they are."""
    size = batch._page_size
    found: list[tuple[int, int, Sequence]] = []
    rows = zip(batch.sequences, batch.computed.tolist(), batch.capacity.tolist(), strict=False)
    for sequence, computed, capacity in rows:
        found += [(step, sequence.key, sequence) for step in range(capacity - computed, steps, size)]
    found.sort(key=lambda each: each[:2])
    return found


def _later(step: Step, count: int) -> Step:
    rows = step.generating
    moved = dataclasses.replace(rows, starts=rows.starts + count, tables=[])
    return dataclasses.replace(step, id=step.id + count, generating=moved)
