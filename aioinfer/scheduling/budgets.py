"""Budgets: the requests that share output tokens with others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioinfer.scheduling.sequence import Sequence

if TYPE_CHECKING:
    from aioinfer.scheduling.queues import RequestQueues

__all__ = ["Budgets"]


class Budgets:
    """Counts their tokens after each step, and ends them. Of no cost while no request has a budget."""

    __slots__ = ("_queues", "counts")

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        #: some had one when it was counted last, or came since
        self.counts = False

    def add(self, sequence: Sequence) -> None:
        """A request with a budget is queued."""
        budget = sequence.request.budget
        assert budget is not None
        self._queues.sharing.setdefault(budget, {})[sequence] = None
        self.counts = True

    def charge(self, changed: list[Sequence]) -> list[Sequence]:
        """Count what came of them, in this order. Returns the requests that changed, those that end because
        others have used all tokens included. O(requests that change, and budgets)."""
        if not self.counts:
            return changed
        for sequence in changed:
            budget, count, before = sequence.request.budget, len(sequence.output_ids), sequence.counted
            if budget is None or count <= before:
                continue
            budget.left -= count - before
            sequence.counted = count
            if budget.left < 0:
                self._end(sequence)
                sequence.trim(max(before, count + budget.left))  # which gives these back
        sharing = self._queues.sharing
        ended = [each for budget, those in sharing.items() if budget.left <= 0 for each in those]
        for sequence in ended:
            self._end(sequence)
        self.counts = bool(sharing)
        return [*changed, *(each for each in ended if each not in changed)] if ended else changed

    def _end(self, sequence: Sequence) -> None:
        if not self._queues.finish(sequence, "length") and sequence.output.error is None:
            # A token that is dropped had ended it.
            sequence.output.finish_reason, sequence.output.stop_reason = "length", None
