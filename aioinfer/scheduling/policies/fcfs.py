"""First come, first served."""

from __future__ import annotations

from aioinfer.scheduling.policy import Policy
from aioinfer.scheduling.sequence import Sequence

__all__ = ["Fcfs"]


class Fcfs(Policy):
    """First come, first served. All are of one rank: packing may let short ones go before long ones."""

    def rank(self, sequence: Sequence) -> None:
        return None
