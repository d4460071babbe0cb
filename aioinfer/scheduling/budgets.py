"""Budgets: the requests that share output tokens with others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from aioinfer.scheduling.queues import RequestQueues

__all__ = ["Budgets"]


class Budgets:
    """Counts their tokens after each step, and ends them. Of no cost while no request has a budget."""

    __slots__ = ("_counted", "_queues")

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        #: by request, the tokens of its output that were counted
        self._counted: dict[Sequence, int] = {}

    def __bool__(self) -> bool:
        return bool(self._counted)

    def add(self, sequence: Sequence) -> None:
        """A request with a budget is queued; what it begins with was counted before."""
        self._counted[sequence] = len(sequence.output_ids)

    def charge(self, changed: list[Sequence]) -> list[Sequence]:
        """Count what a step brought, in the order of its rows. Returns the requests that changed, those that
        end because others have used all tokens included."""
        counted = self._counted
        for sequence in changed:
            budget, count = sequence.request.budget, len(sequence.output_ids)
            if budget is None or sequence not in counted:
                continue
            budget.left -= count - counted[sequence]
            counted[sequence] = count
            if budget.left < 0:
                self._end(sequence)
                sequence.trim(count + budget.left)  # which gives these back
        ended: list[Sequence] = []
        for sequence in [*counted]:
            budget = sequence.request.budget
            assert budget is not None
            if not sequence.finished and budget.left <= 0:
                self._end(sequence)
                ended.append(sequence)
            if sequence.finished:
                del counted[sequence]
        return [*changed, *(each for each in ended if each not in changed)] if ended else changed

    def _end(self, sequence: Sequence) -> None:
        if not self._queues.finish(sequence, "length") and sequence.output.error is None:
            # A token that is dropped had ended it.
            sequence.output.finish_reason, sequence.output.stop_reason = "length", None
