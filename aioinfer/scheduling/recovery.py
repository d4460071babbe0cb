"""Recovery: after a step that failed, smaller ones, requests that go on alone, and results that are junk."""

from __future__ import annotations

from collections import abc

from aioinfer.sampling.outcomes import DEFERRED, NO_TOKEN
from aioinfer.scheduling.sequence import Sequence, SequenceState
from aioinfer.scheduling.step import Row, Step

__all__ = ["StepCap", "Suspects", "failed_before", "struck", "without_junk"]

#: steps that a lowered cap stays where it is: at first, and at most
_FIRST_PATIENCE = 16
_MOST_PATIENCE = 4096


class StepCap:
    """The number of tokens a step may have: all that the limits allow, until one runs out of memory.

    Then half of what that step had, for a number of steps that did fit, and from there an eighth more with
    each one. Repeated shortages are remembered: every time the cap stays down for twice as many steps as
    the time before, up to a bound; steps without a cap count that down again.
    """

    __slots__ = ("_least", "_left", "_most", "_newest", "_patience", "tokens")

    def __init__(self, most: int, least: int = 1) -> None:
        self._least = least
        #: tokens that the next step may have, at least ``least``
        self.tokens = most
        self._most = most
        self._patience = _FIRST_PATIENCE
        self._left = 0
        #: the newest launched step when the cap was lowered
        self._newest = 0

    def ran_out(self, step: Step, newest: int) -> None:
        """A step was too much for the memory; ``newest`` is the newest launched one."""
        self.tokens = max(self._least, min(self.tokens, step.num_tokens // 2))
        if step.id <= self._newest:
            return  # launched before the cap was lowered: the same shortage
        self._newest = newest
        self._left = self._patience
        self._patience = min(2 * self._patience, _MOST_PATIENCE)

    def fitted(self) -> None:
        """A step did not run out of memory."""
        if self.tokens == self._most:
            self._patience = max(_FIRST_PATIENCE, self._patience - 1)
        elif self._left:
            self._left -= 1
        else:
            self.tokens = min(self._most, self.tokens + max(1, self.tokens // 8))


class Suspects:
    """The requests of steps that raised: one of them may be what a step raised for. Each goes on alone until
    it has come further, so that a step raises for no other request again."""

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __bool__(self) -> bool:
        return bool(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """The request starts over, since its step raised."""
        sequence.recovery.failed_at = sequence.cursor.progress
        self._sequences.append(sequence)

    def next(self) -> Sequence | None:
        """The one that goes on alone now, one that runs before one that waits; None if all are parked."""
        known, self._sequences = self._sequences, []
        for each in known:
            if failed_before(each) and not each.finished:
                self._sequences.append(each)
            else:
                # It can lose what it had read: a block begins again with other weights.
                each.recovery.failed_at = -1
        ready = (each for each in self._sequences if not each.parked)
        return min(ready, key=lambda each: each.state is SequenceState.WAITING, default=None)


def failed_before(sequence: Sequence) -> bool:
    """Whether a step of the request raised, and it came no further since."""
    return sequence.cursor.progress <= sequence.recovery.failed_at


def struck(step: Step) -> list[Sequence]:
    """The requests of a step that failed which cannot go on from what they launched so far.

    Not those that have ended, those that are going on from elsewhere already, and those for which this was a
    chunk of an earlier life.
    """
    return [
        row.sequence for row in step.rows if step.id > row.sequence.recovery.void_until and _goes_on_from(row)
    ]


def _goes_on_from(row: Row) -> bool:
    sequence = row.sequence
    if sequence.state is SequenceState.RUNNING:
        return row.slot == sequence.kv.slot
    return not sequence.finished and sequence.pending > 0


def without_junk(step: Step, tokens: abc.Sequence[int]) -> list[int]:
    """A step's tokens, but for those that go on from where a step failed: these rows sampled nothing."""
    return [
        DEFERRED if token != NO_TOKEN and step.id <= sequence.recovery.junk_until else token
        for sequence, token in zip(step.sequences, tokens, strict=True)
    ]
