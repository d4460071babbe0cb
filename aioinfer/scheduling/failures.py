"""Failures: what becomes of the requests of a step that raised, or for which the memory did not suffice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioinfer.scheduling.recovery import StepCap, Suspects, failed_before, struck
from aioinfer.scheduling.sequence import Sequence, SequenceState

if TYPE_CHECKING:
    from aioinfer.scheduling.queues import RequestQueues
    from aioinfer.scheduling.step import Step

__all__ = ["Failures"]


class Failures:
    """Ends the requests that are at fault, and has all others start over. A part of
    :class:`~aioinfer.scheduling.scheduler.Scheduler`."""

    __slots__ = ("_cap", "_queues", "_suspects")

    def __init__(self, queues: RequestQueues, cap: StepCap, suspects: Suspects) -> None:
        self._queues = queues
        self._cap = cap
        self._suspects = suspects

    def fail(self, step: Step, error: BaseException) -> list[Sequence]:
        """A step raised: its requests start over, and go on one at a time until they have come further.

        One that was alone in the step, or came no further since the last time, ends with ``error``. Returns
        the requests that ended.
        """
        queues = self._queues
        queues.memory.resolved(step.id)
        if step.encoding is not None:
            return self._fail_encoding(step, error)
        queues.junk_until = queues.last_step
        alone, failed = step.num_rows == 1, list[Sequence]()
        features = queues.memory.features
        lacked = features is not None and features.lacked(step)
        for sequence in struck(step):
            if lacked:
                queues.start_over(sequence)
            elif alone or failed_before(sequence):
                queues.memory.distrust(sequence)
                queues.finish(sequence, "abort", error)
                failed.append(sequence)
            else:
                queues.start_over(sequence)
                self._suspects.add(sequence)
        return failed

    def run_out(self, step: Step, error: BaseException) -> list[Sequence]:
        """The memory did not suffice for a step: its requests start over, in smaller steps.

        Of those to which that happened before, and which came no further since, one ends with ``error``: the
        longest, and among equals the newest. Returns the requests that ended.
        """
        queues = self._queues
        queues.memory.resolved(step.id)
        if step.encoding is not None:
            sequence = step.encoding.sequence
            before, now = sequence.recovery.ran_out_at, sequence.cursor.progress
            sequence.recovery.ran_out_at = now
            return self._fail_encoding(step, error, once_more=before != now)
        self._cap.ran_out(step, queues.last_step)
        queues.junk_until = queues.last_step
        sequences = struck(step)
        again = [each for each in sequences if each.recovery.ran_out_at == each.cursor.progress]
        failed = sorted(again, key=lambda sequence: (sequence.known, sequence.key))[-1:]
        for sequence in failed:
            queues.finish(sequence, "abort", error)
        for sequence in sequences:
            if sequence.state is SequenceState.FINISHED:
                continue
            sequence.recovery.ran_out_at = sequence.cursor.progress
            queues.counters.out_of_memory_retries += 1
            queues.start_over(sequence)
        return failed

    def _fail_encoding(self, step: Step, error: BaseException, *, once_more: bool = False) -> list[Sequence]:
        """A step of the encoder raised: it was computing for one request, which ends, unless it may try
        ``once_more``. Others that have the same image will see for themselves."""
        features, (sequence,) = self._queues.memory.features, step.concerned
        assert features is not None
        if not features.failed(step, self._queues.last_step) or once_more:
            return []
        return [sequence] if self._queues.finish(sequence, "abort", error) else []
