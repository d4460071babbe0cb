"""Faults: which requests end when a part of planning raises, a plugin's queue policy for example."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioinfer.scheduling.queues import RequestQueues
    from aioinfer.scheduling.sequence import Sequence

__all__ = ["PlanFaults", "end_with"]


def end_with(
    queues: RequestQueues, sequence: Sequence, error: BaseException, *, distrust: bool = False
) -> bool:
    """End a request for which ``error`` was raised; True the first time. Raises RuntimeError, caused by
    ``error``, if that left the request in a state in which it cannot be ended.

    ``distrust``: its KV must not be shared.
    """
    try:
        if distrust:
            queues.memory.distrust(sequence)
        return queues.finish(sequence, "abort", error)
    except Exception as second:
        raise RuntimeError(f"{error!r} left {sequence} in a state that has no end: {second!r}") from error


class PlanFaults:
    """The requests that ended with an error while steps were planned, until :meth:`take` is called."""

    __slots__ = ("_ended", "_queues")

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self._ended: list[tuple[Sequence, Exception]] = []

    def __bool__(self) -> bool:
        return bool(self._ended)

    def take(self) -> list[tuple[Sequence, Exception]]:
        """The requests that ended since the last call, with what was raised."""
        ended, self._ended = self._ended, []
        return ended

    def end(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """End requests of which the step that is being planned has no row, and those that the policy did not
        queue."""
        queues = self._queues
        unqueued = [sequence for sequence in queues.shelved.values() if not sequence.parked]
        for sequence in [*sequences, *unqueued]:
            # A row that was begun is launched with no step: what it holds is not fenced by it.
            sequence.kv.last_step = min(sequence.kv.last_step, queues.last_step)
            if end_with(queues, sequence, error):
                self._ended.append((sequence, error))
