"""ColumnLauncher: decode steps between two events, all at once.

A batch that only decodes does the same in each step until a request ends or another one comes. Its steps
differ by the positions that they read, so their ends have a closed form, and what they leave behind in
scheduler and outputs can be written in one go. An engine with such a *column* under way is told by
:meth:`catch_up` before anything touches it: the steps that have ended by then are made good, the last of them
at its own moment. So every figure is the one of the exact mode::

    exact     land, read, plan │ land, read, plan │ land, read, plan │ land, read, plan (a request ends)
    columns   ├──────────────────── skipped ─────────────────────────┤ land, read, plan
                        ▲ a request comes: catch up to here
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from aioinfer.scheduling.costs import Sizes
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.token_batch import TokenBatch
from aioinfer.twin.device import TwinLauncher
from aioinfer.twin.load import ANSWER

if TYPE_CHECKING:
    import asyncio

    from aioinfer.loop.runtime import Runtime
    from aioinfer.scheduling.step import Step

__all__ = ["ColumnLauncher"]

#: steps that are worth a column
_FEW = 3
#: seconds before a step's end at which the next one is planned, if planning is put off: see loop.pacing
_LEAD = 0.005


class ColumnLauncher(TwinLauncher):
    """A TwinLauncher that skips steps. ``runtime``: of its engine, set when that has started."""

    runtime: Runtime | None = None
    #: of the column under way, the ends of its steps: of the two in flight when it began, and of those after
    _ends: list[float] | None = None
    _due: asyncio.TimerHandle | None = None

    def catch_up(self) -> None:
        """Something is about to happen to the engine, or is to be read of it."""
        if self._ends is None:
            return
        now = self._loop.time()
        landed = bisect_right(self._ends, now - self._host.notice)
        self._skip(max(0, landed - 1))
        driver = self.runtime.driver if self.runtime is not None else None
        self._at(self.flights[0][1] + self._host.notice, self._settle)
        timer = None if driver is None else driver._timer
        if driver is not None and timer is not None and timer.when() <= now:
            timer.cancel()
            self._at(timer.when(), driver._put_off_no_longer)

    def _at(self, when: float, call: Callable[[], None]) -> None:
        """Make a call as of a moment that has passed."""
        now, self._loop._now = self._loop._now, when
        try:
            call()
        finally:
            self._loop._now = now

    def _read(self) -> None:
        """Begin a column with the step that has ended, or settle it."""
        count = self._steps()
        if count < _FEW:
            self._settle()
            return
        (_, first, _), (handle, second, timer) = self.flights
        rows = handle.step.generating
        assert timer is not None
        timer.cancel()
        read = float(rows.starts.sum())
        ends, end = [first, second], second
        for _ in range(count):
            read += len(rows)
            end += self._step.seconds(Sizes(len(rows), read))
            ends.append(end)
        self._ends = ends
        self._due = self._loop.call_at(ends[count] + self._host.notice, self._over, count)

    def _over(self, count: int) -> None:
        self._skip(count)
        self._settle()

    def _steps(self) -> int:
        """The number of steps that can be skipped now: none ends a request or has another one beside it."""
        runtime = self.runtime
        if runtime is None or len(self.flights) != 2 or runtime.driver._timer is not None:
            return 0
        scheduler, core = runtime.core.scheduler, runtime.core
        queues, memory, batch = scheduler.queues, scheduler.memory, scheduler.queues.batch
        rows = len(batch)
        if not isinstance(batch, TokenBatch) or not rows or queues.prefilling or queues.arriving:
            return 0
        full = len(queues.running) >= scheduler.config.running_requests and not scheduler.config.preemption
        if (queues.waiting and not full) or queues.shelved or core.texts.behind or memory.pages.fenced:
            return 0
        for handle, *_ in self.flights:
            step = handle.step
            other = step.prefilling or step.generating.ending or step.generating.drafts
            if other or len(step.generating) != rows or step.encoding is not None:
                return 0
        if runtime.driver.paused or runtime.driver._holds or scheduler.config.max_decode_rows is not None:
            return 0
        (_, first, _), (_, second, _) = self.flights
        between = self._host.notice + sum(
            fixed + row * rows for fixed, row in (self._host.plan, self._host.read)
        )
        if between > min(_LEAD, (second - first) / 2):
            return 0  # the device waits for the host
        count = int((batch.limit[:rows] - batch.computed[:rows]).min()) - 2
        while count >= _FEW and len(self._pages(batch, count)) > memory.pages.free + memory.evictable:
            count //= 2
        return count

    @staticmethod
    def _pages(batch: TokenBatch, count: int) -> list[tuple[int, int, Sequence]]:
        """Pages that are taken in so many steps: step, key, and request, in the order in which they are."""
        size, found = batch._page_size, []
        rows = zip(batch.sequences, batch.computed.tolist(), batch.capacity.tolist(), strict=False)
        for sequence, computed, capacity in rows:
            found += [(step, sequence.key, sequence) for step in range(capacity - computed, count, size)]
        found.sort(key=lambda each: each[:2])
        return found

    def _skip(self, count: int) -> None:
        """End the column as if ``count`` steps had landed and as many had been launched."""
        ends, self._ends = self._ends, None
        assert ends is not None
        assert self._due is not None
        assert self.runtime is not None
        self._due.cancel()
        (oldest, *_), (newest, *_) = self.flights
        notice, loop = self._host.notice, self._loop
        self.flights.clear()
        self.flights.append((oldest, ends[count], None))
        timer = loop.call_at(ends[count + 1] + notice, self._land)
        self.flights.append((newest, ends[count + 1], timer))
        self.busy += ends[count + 1] - ends[1]
        self.device_until = ends[count + 1]
        if not count:
            return
        runtime, rows = self.runtime, len(oldest.step.generating)
        scheduler, driver = runtime.core.scheduler, runtime.driver
        batch, queues = scheduler.queues.batch, scheduler.queues
        assert isinstance(batch, TokenBatch)
        times = [end + notice for end in ends[:count]]
        for sequence in batch.sequences:
            sequence.output_ids += [ANSWER] * count
            sequence.output.token_times += times
        runtime.core.texts.output_tokens += count * rows
        for _, _, sequence in self._pages(batch, count):
            scheduler.memory.grow(sequence)
            batch.changed_pages(sequence)
        batch.computed[:rows] += count
        step, read = oldest.step, float(oldest.step.generating.starts.sum())
        # Those that follow are launched before the one in front of them ends.
        launched = [oldest.launched_at, newest.launched_at, *[0.0] * count]
        before = driver._last_progress
        for begun, now, end in zip(launched, times, ends, strict=False):
            if driver._pace is not None:
                driver._pace.landed(step, begun, now, now - end)
            scheduler.times.note(Sizes(rows, read), now - max(before, begun))
            before = now
            scheduler.ratio.decay()
            read += rows
        for handle, begun in zip((oldest, newest), launched[count:], strict=True):
            handle.step, handle.launched_at = _later(handle.step, count), begun
        if self._trace is not None:
            for number, (begin, end) in enumerate(pairwise(ends[1 : count + 2]), newest.step.id - count + 1):
                self._trace.step(self._number, "forward", number, begin, end, rows)
        self.skipped += count
        scheduler.memory.resolved(oldest.step.id - 1)
        driver._last_progress = scheduler.times.now = times[-1]
        queues.counters.steps += count
        queues.counters.decode_tokens += count * rows
        queues.last_step = batch.last_step = runtime.core._newest_step = scheduler._newest_rows = (
            newest.step.id
        )


def _later(step: Step, count: int) -> Step:
    rows = step.generating
    moved = dataclasses.replace(rows, starts=rows.starts + count, tables=[])
    return dataclasses.replace(step, id=step.id + count, generating=moved)
