"""Outcome: what came of a simulated load, or of one that was measured, in columns."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field, fields
from math import log

import numpy as np
import numpy.typing as npt

from aioinfer.scheduling.costs import Sizes

__all__ = ["Durations", "Outcome"]

#: relative width of a class of durations, and the shortest one, in seconds
_WIDTH = 1.002
_LEAST = 1e-6


class Durations(Counter[int]):
    """Counts of durations in classes that are 0.2 % wide, however many there are."""

    def add(self, seconds: npt.NDArray[np.float64]) -> None:
        """Note these durations."""
        classes = (np.log(np.maximum(seconds, _LEAST) / _LEAST) / log(_WIDTH)).astype(np.int64)
        self.update(classes.tolist())

    def quantile(self, share: float) -> float:
        """Seconds that this share of the durations does not exceed; 0 without any."""
        left = share * self.total()
        for found in sorted(self):
            left -= self[found]
            if left <= 0:
                return float(_LEAST * _WIDTH ** (found + 0.5))
        return 0.0


@dataclass(slots=True)
class Outcome:
    """Requests in the order of their ends, one entry per request in each column; times in seconds from the
    beginning of the load. A request that was refused, or failed, has no ``first``: NaN."""

    arrived: array[float] = field(default_factory=lambda: array("d"))
    #: when its first step was launched, when it got its first token, and when it ended
    admitted: array[float] = field(default_factory=lambda: array("d"))
    first: array[float] = field(default_factory=lambda: array("d"))
    ended: array[float] = field(default_factory=lambda: array("d"))
    prompt_tokens: array[int] = field(default_factory=lambda: array("l"))
    #: of these, found in the prefix cache
    cached_tokens: array[int] = field(default_factory=lambda: array("l"))
    output_tokens: array[int] = field(default_factory=lambda: array("l"))
    #: seconds from refusal to the predicted moment of a retry; 0 of others
    refused: array[float] = field(default_factory=lambda: array("d"))
    #: gaps between tokens of a stream, of all streams
    itl: Durations = field(default_factory=Durations)
    #: names of errors, with their numbers
    errors: Counter[str] = field(default_factory=Counter)
    #: from the beginning to the end of the last request
    seconds: float = 0.0
    steps: int = 0
    retractions: int = 0
    #: seconds that devices computed, and that replicas served, which is what they cost: of all together
    busy: float = 0.0
    served: float = 0.0
    #: largest sizes of a step, each by itself
    largest: Sizes = field(default_factory=lambda: Sizes(0.0))
    #: over time: (seconds, waiting, running, share of pages in use), of all replicas together
    samples: list[tuple[float, int, int, float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.arrived)

    def add(self, *row: float) -> None:
        """Note a request that has ended, by its entries from ``arrived`` to ``refused``."""
        for each, value in zip(fields(self), row, strict=False):
            getattr(self, each.name).append(value)
