"""Outcome: what came of a simulated load, or of one that was measured, in columns."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from math import log

import numpy as np
import numpy.typing as npt

__all__ = ["Durations", "Outcome"]

#: relative width of a class of durations, and the shortest one, in seconds
_WIDTH = 1.002
_LEAST = 1e-6
_LOG = log(_WIDTH)


class Durations:
    """Counts of durations in classes that are 0.2 % wide, however many there are."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        #: seconds, of all together
        self.total = 0.0

    def __len__(self) -> int:
        return self._counts.total()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Durations) and self._counts == other._counts

    __hash__ = None  # type: ignore[assignment]

    def add(self, seconds: npt.NDArray[np.float64], count: int = 1) -> None:
        """Note these durations, each ``count`` times."""
        classes = (np.log(np.maximum(seconds, _LEAST) / _LEAST) / _LOG).astype(np.int64)
        for found, times in zip(*np.unique(classes, return_counts=True), strict=True):
            self._counts[int(found)] += count * int(times)
        self.total += count * float(seconds.sum())

    def quantile(self, share: float) -> float:
        """Seconds that this share of the durations does not exceed; 0 without any."""
        left = share * len(self)
        for found in sorted(self._counts):
            left -= self._counts[found]
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
    #: seconds that devices computed, of all replicas together
    busy: float = 0.0
    #: seconds that a replica served, of all together: what they cost
    served: float = 0.0
    #: over time: (seconds, waiting, running, share of pages in use), of all replicas together
    samples: list[tuple[float, int, int, float]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.arrived)

    def add(
        self,
        arrived: float,
        admitted: float,
        first: float,
        ended: float,
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
        refused: float,
    ) -> None:
        """Note a request that has ended."""
        times = (self.arrived, arrived), (self.admitted, admitted), (self.first, first), (self.ended, ended)
        for column, value in (*times, (self.refused, refused)):
            column.append(value)
        self.prompt_tokens.append(prompt_tokens)
        self.cached_tokens.append(cached_tokens)
        self.output_tokens.append(output_tokens)
