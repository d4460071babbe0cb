"""Step time: what steps take here, and how much prefill one may have for running streams to wait no longer
than a target.

It begins with the :class:`~aioinfer.scheduling.costs.Costs` of a calibration, or with a guess, and learns
from the steps that run, on other hardware and with other neighbours as well: each of the five parts of a step
has a factor. There is no clock here: whoever runs the steps says what they took.
"""

from __future__ import annotations

from math import isfinite
from typing import TYPE_CHECKING

from aioinfer.scheduling.costs import Costs, Sizes, StepCosts, generated
from aioinfer.scheduling.size_costs import SizeCosts

if TYPE_CHECKING:
    from aioinfer.scheduling.step import Generating, Step

__all__ = ["StepTime"]

#: until the first step was measured, for the seconds of a prefill token. The base is often higher: what a few
#: tokens take is thought to be theirs, and many are not expected to be cheap
_TOKEN = 0.005
_GUESS = StepCosts(4.0 * _TOKEN, 0.0, _TOKEN / 256, _TOKEN / 4096, (_TOKEN,))
#: share of the error of a step that is corrected, more while there is more doubt: of a step without prefill,
#: and of one with prefill that takes as long as the target. Shorter ones tell less of that, longer ones more
_NEWEST = 0.3
#: a step that took more than this multiple of what was expected was disturbed, and counts as the multiple
_MOST = 2.0
#: share of a cost that is left at least after one step
_LEAST = 0.5
#: bounds of the factors of what was calibrated
_REFINED = (0.5, 2.0)
#: steps after which the costs are taken for measured
_ENOUGH = 16
#: share of the newest step in the means over steps in which rows generate
_RECENT = 0.02
#: least doubt about a cost, where 1 is that of one never measured
_DOUBT = 0.05
#: where decoding takes most of the target, prefill may take this share of decoding's time all the same
_PREFILL_SHARE = 0.5
#: longest chunk that is thought of
_LONGEST = 1 << 24


class StepTime:
    """Costs of steps, in seconds. ``target``: of a step with prefill while requests generate; 0: any time."""

    __slots__ = (
        *("_beside", "_calibrated", "_context", "_costs", "_doubts", "_factors", "_refines", "_steps"),
        *("cut_seconds", "cut_steps", "decodes", "now", "target", "verifies"),
    )

    def __init__(self, target: float, costs: Costs | None = None, *, refines: bool = True) -> None:
        """``costs``: of a calibration; what is learned stays within bounds of them. ``refines``: learn,
        where there are any."""
        self.target = target
        self._calibrated = costs is not None
        self._refines = refines
        #: the time, as whoever runs the steps said it last
        self.now = 0.0
        self._costs = _GUESS if costs is None else costs.step
        self._factors = [1.0] * 5
        self._doubts = [1.0 if costs is None else _DOUBT] * 5
        #: positions that a row reads, and seconds of prefill, in steps in which rows generate
        self._context = self._beside = 0.0
        #: steps that were measured
        self._steps = 0
        #: of steps without and with drafts, by their size: what drafts are judged by
        self.decodes = SizeCosts(like=None if costs is None else self)
        self.verifies = SizeCosts(like=self.decodes)
        #: steps whose prefill was cut, and seconds of them that were expected for other rows
        self.cut_steps, self.cut_seconds = 0, 0.0

    def observe(self, step: Step, seconds: float) -> None:
        """A step took so long, from the end of the one before it.

        The error goes to the costs by the squares of their parts in this step and by how little they were
        measured before: steps without prefill settle what the other rows cost, the others what prefill costs.
        """
        if step.multi_step is None:  # else it is not known how many rounds it had
            self.note(Sizes.of(step), seconds)

    def note(self, sizes: Sizes, seconds: float) -> None:
        """The same, by its sizes."""
        if not (seconds > 0 and isfinite(seconds)):
            return
        self._steps += 1
        learns = self._refines or not self._calibrated
        parts = self._parts(sizes) if learns or sizes.tokens else [0.0] * 5
        if self._steps == 1 and not self._calibrated:
            expected = sum(parts)
            self._factors = [seconds / expected] * 5
            return
        if sizes.rows:
            self._beside += _RECENT * (sum(parts[3:]) - self._beside)
            self._context += _RECENT * (sizes.context / sizes.rows - self._context)
        if learns:
            self._learn(parts, seconds, prefills=sizes.tokens > 0)

    def _learn(self, parts: list[float], seconds: float, *, prefills: bool) -> None:
        expected = sum(parts)
        weights = [doubt * part * part for doubt, part in zip(self._doubts, parts, strict=True)]
        shares = [weight / sum(weights) for weight in weights]
        newest = _NEWEST
        if prefills and self.target:
            newest = seconds / (seconds + (1 / _NEWEST - 1) * self.target)
        doubt = sum(share * each for share, each in zip(shares, self._doubts, strict=True))
        if doubt < newest:
            doubt, seconds = newest, min(seconds, _MOST * expected)
        for at, (share, part) in enumerate(zip(shares, parts, strict=True)):
            if share > 0:
                factor = 1 + doubt * (seconds - expected) * share / part
                self._factors[at] *= max(_LEAST, factor)
                if self._calibrated:
                    self._factors[at] = min(max(_REFINED[0], self._factors[at]), _REFINED[1])
                if factor >= _LEAST:  # else it is still wrong
                    self._doubts[at] = max(_DOUBT, self._doubts[at] * (1 - doubt * share))

    def _parts(self, sizes: Sizes) -> list[float]:
        return [factor * part for factor, part in zip(self._factors, self._costs.parts(sizes), strict=True)]

    def seconds(self, sizes: Sizes) -> float:
        """Seconds of a step."""
        return sum(self._parts(sizes))

    def decoding(self, rows: Generating, tokens: int) -> float:
        """Seconds of a step without prefill; where none of its rows generates, with ``tokens`` that do."""
        return self.seconds(Sizes(*generated(rows)) if rows else Sizes(tokens))

    @property
    def known(self) -> bool:
        """The costs are calibrated, or those of enough steps that ran."""
        return self._calibrated or self._steps >= _ENOUGH

    def generating(self, rows: float, positions: float) -> float:
        """Seconds of a step whose ``rows`` generate and read so many positions together, and of the prefill
        that such steps have had of late."""
        return self.seconds(Sizes(rows, positions)) + self._beside

    def of(self, positions: int) -> float:
        """Seconds of a step of so many rows that generate, with as much to read as rows have of late."""
        return self.seconds(Sizes(positions, positions * self._context))

    def known_below(self, positions: int) -> None:
        """As in Expected: no size is known better than others."""

    def left(self, decoding: float) -> float:
        """Seconds for prefill in a step whose rows that generate take ``decoding``."""
        return max(self.target - decoding, _PREFILL_SHARE * decoding)

    def prefill(self, start: int, length: int, before: float = 0) -> float:
        """Seconds of a chunk of ``length`` positions from ``start`` on, in a step that has ``before``
        others."""
        costs, (*_, token, attention) = self._costs, self._factors
        more = costs.positions(before + length) - costs.positions(before)
        return token * more + attention * costs.attention * length * (start + length / 2)

    def fitting(self, start: int, seconds: float, before: float = 0) -> int:
        """The longest chunk from ``start`` on that takes at most ``seconds``; perhaps 0."""
        low, high = 0, 1
        while high < _LONGEST and self.prefill(start, high, before) <= seconds:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.prefill(start, middle, before) <= seconds else (low, middle)
        return low

    def cut(self, decoding: float) -> None:
        """A step has less prefill than without the target; ``decoding``: seconds expected for other rows."""
        self.cut_steps += 1
        self.cut_seconds += decoding
