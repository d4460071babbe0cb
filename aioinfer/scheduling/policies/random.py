"""A seeded random order."""

from __future__ import annotations

import hashlib

from aioinfer.scheduling.policy import Ranked
from aioinfer.scheduling.sequence import Sequence

__all__ = ["Random"]


class Random(Ranked):
    """A lottery; the same seed draws the same order."""

    def rank(self, sequence: Sequence) -> bytes:
        return hashlib.blake2b(b"%d %d" % (self._seed, sequence.key), digest_size=8).digest()
