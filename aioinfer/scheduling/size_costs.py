"""SizeCosts: how long steps take, by their number of positions, learned from those that ran."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import Protocol

__all__ = ["Expected", "SizeCosts"]


class Expected(Protocol):
    """What steps are thought to take until they have run."""

    def of(self, positions: int) -> float:
        """Seconds of a step."""

    def known_below(self, positions: int) -> tuple[int, float] | None:
        """The largest known size of no more positions, and its seconds."""


#: weight of the newest step
_NEWEST = 0.2
#: a step that took more than this multiple of the time for its size was disturbed and counts as the multiple;
#: so does the first one of its size, in which code may have been loaded; of the first two the shorter counts
_MOST = 2.0
#: how much less steps are expected to take each time that they are not worth a try
_HOPE = 0.01
#: what a position more is expected to cost until it is known, in steps of one position
_PER_POSITION = 0.04
#: positions from which on sizes are counted in steps of an eighth
_EXACT = 32


class SizeCosts:
    """Seconds of steps without prefill. Sizes that did not occur are interpolated."""

    def __init__(self, like: Expected | None = None) -> None:
        """``like``: of steps that these are expected to be like while nothing is known, and never hoped to be
        faster than."""
        self._like = like
        #: factor of all that is known
        self._hope = 1.0
        self._known: dict[int, float] = {}
        #: of ``_known``, rising
        self._sizes: list[int] = []
        #: sizes of which one step is known, or too little that is new
        self._once: set[int] = set()

    def __bool__(self) -> bool:
        """Anything is known."""
        return bool(self._known or self._like)

    def observe(self, positions: int, seconds: float) -> None:
        """Record a step of ``positions`` that took ``seconds``."""
        size = _bucket(positions)
        if self._hope < 1.0:
            if seconds <= self.of(size):
                self._known = {each: took * self._hope for each, took in self._known.items()}
            self._hope = 1.0
        known = self._known.get(size)
        if known is None:
            seconds = min(seconds, _MOST * self.of(size)) if self else seconds
            self._sizes.insert(bisect_left(self._sizes, size), size)
            self._known[size] = seconds
            self._once.add(size)
        elif size in self._once:
            self._known[size] = min(known, seconds)
            self._once.discard(size)
        else:
            self._known[size] = known + _NEWEST * (min(seconds, _MOST * known) - known)

    def of(self, positions: int) -> float:
        """Seconds that a step is expected to take; relative to one position while nothing is known."""
        least = self._like.of(positions) if self._like else 0.0
        if self._sizes:
            measured = self._measured(positions)
            return measured if self._hope == 1.0 else max(self._hope * measured, min(measured, least))
        return least or 1.0 + _PER_POSITION * (positions - 1)

    def _measured(self, positions: int) -> float:
        sizes, known = self._sizes, self._known
        at = bisect_left(sizes, positions)
        if at < len(sizes) and sizes[at] == positions:
            return known[positions]
        if 0 < at < len(sizes):
            low, high = sizes[at - 1], sizes[at]
            return _between(positions, low, known[low], high, known[high])
        if at == 0 and self._like is not None and (below := self._like.known_below(positions)) is not None:
            return _between(positions, *below, sizes[0], known[sizes[0]])
        nearest = sizes[0] if at == 0 else sizes[-1]
        one = known[nearest] / (1.0 + _PER_POSITION * (nearest - 1))
        return max(known[nearest] + one * _PER_POSITION * (positions - nearest), 0.5 * known[nearest])

    def known_below(self, positions: int) -> tuple[int, float] | None:
        """The largest known size of no more positions, and its seconds."""
        at = bisect_right(self._sizes, positions)
        return None if at == 0 else (self._sizes[at - 1], self._known[self._sizes[at - 1]])

    def doubt(self) -> None:
        """No such steps ran for long: the next one of a size counts in full if it is shorter."""
        self._once.update(self._known)

    def hope(self) -> None:
        """Such steps are not worth their time: expect a little less, until one of them runs. Else a wrong
        measurement would never be corrected."""
        self._hope *= 1.0 - _HOPE


def _between(positions: int, low: int, low_seconds: float, high: int, high_seconds: float) -> float:
    return low_seconds + (positions - low) / (high - low) * (high_seconds - low_seconds)


def _bucket(positions: int) -> int:
    if positions <= _EXACT:
        return positions
    step = 1 << (positions.bit_length() - 4)
    return positions // step * step
