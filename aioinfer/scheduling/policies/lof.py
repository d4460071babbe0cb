"""Longest output first."""

from __future__ import annotations

from aioinfer.scheduling.policy import Ranked
from aioinfer.scheduling.sequence import Sequence

__all__ = ["Lof"]


class Lof(Ranked):
    """Longest output first: long ones start early, so that a batch of jobs ends together."""

    def rank(self, sequence: Sequence) -> int:
        return sequence.length - sequence.max_length
