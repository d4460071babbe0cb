"""Step time: how much prefill a step may have for running streams to wait no longer than a target.

What a step takes is modelled as a sum of five parts, in the manner of the dynamic chunks of SGLang and vLLM
(vllm#41247), to which the rows that generate are added::

    seconds = base + row * generating tokens + context * positions that these read
                   + token * prefill tokens  + attention * pairs of a prefill token and one before it

The costs are learned from the steps that run, on other hardware and with other neighbours as well. There is
no clock here: whoever runs the steps says what they took.
"""

from __future__ import annotations

from math import isfinite, sqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioinfer.scheduling.step import Generating, Row, Step

__all__ = ["StepTime"]

#: costs in those of a prefill token, and the seconds of one, until the first step was measured. The base is
#: often higher: what a few tokens take is thought to be theirs, and many are not expected to be cheap
_SHARES = (4.0, 1.0, 1 / 256, 1.0, 1 / 4096)
_TOKEN = 0.005
#: share of the error of a step that is corrected, more while there is more doubt: of a step without prefill,
#: and of one with prefill that takes as long as the target. Shorter ones tell less of that, longer ones more
_NEWEST = 0.3
#: a step that took more than this multiple of what was expected was disturbed, and counts as the multiple
_MOST = 2.0
#: share of a cost that is left at least after one step
_LEAST = 0.5
#: steps after which the costs are taken for measured
_ENOUGH = 16
#: share of the newest step in the mean of the prefill beside rows that generate
_RECENT = 0.02
#: least doubt about a cost, where 1 is that of one never measured
_DOUBT = 0.05
#: where decoding takes most of the target, prefill may take this share of decoding's time all the same
_PREFILL_SHARE = 0.5


class StepTime:
    """Costs of steps, in seconds. ``target``: of a step with prefill while requests generate; 0: any time,
    and nothing is learned unless ``learns`` is set."""

    __slots__ = (
        "_beside",
        "_costs",
        "_doubts",
        "_steps",
        "cut_seconds",
        "cut_steps",
        "learns",
        "now",
        "target",
    )

    def __init__(self, target: float) -> None:
        self.target = target
        self.learns = target > 0
        #: the time, as whoever runs the steps said it last
        self.now = 0.0
        self._costs = [_TOKEN * share for share in _SHARES]
        self._doubts = [1.0] * len(_SHARES)
        #: seconds of prefill in steps in which rows generate
        self._beside = 0.0
        #: steps that were measured
        self._steps = 0
        #: steps whose prefill was cut, and seconds of them that were expected for other rows
        self.cut_steps, self.cut_seconds = 0, 0.0

    def observe(self, step: Step, seconds: float) -> None:
        """A step took so long, from the end of the one before it.

        The error goes to the costs by the squares of their parts in this step and by how little they were
        measured before: steps without prefill settle what the other rows cost, the others what prefill costs.
        """
        if not self.learns or step.multi_step is not None or not (seconds > 0 and isfinite(seconds)):
            return  # how many rounds a step had is not known
        sizes = *_generated(step.generating), *_prefilled(step.prefilling)
        parts = [cost * size for cost, size in zip(self._costs, sizes, strict=True)]
        expected = sum(parts)
        self._steps += 1
        if self._steps == 1:
            self._costs = [cost * seconds / expected for cost in self._costs]
            return
        if step.generating:
            self._beside += _RECENT * (sum(parts[3:]) - self._beside)
        weights = [doubt * part * part for doubt, part in zip(self._doubts, parts, strict=True)]
        shares = [weight / sum(weights) for weight in weights]
        newest = _NEWEST
        if step.prefilling and self.target:
            newest = seconds / (seconds + (1 / _NEWEST - 1) * self.target)
        doubt = sum(share * each for share, each in zip(shares, self._doubts, strict=True))
        if doubt < newest:
            doubt, seconds = newest, min(seconds, _MOST * expected)
        for at, (share, part) in enumerate(zip(shares, parts, strict=True)):
            if share > 0:
                factor = 1 + doubt * (seconds - expected) * share / part
                self._costs[at] *= max(_LEAST, factor)
                if factor >= _LEAST:  # else it is still wrong
                    self._doubts[at] = max(_DOUBT, self._doubts[at] * (1 - doubt * share))

    def decoding(self, generating: Generating, tokens: int) -> float:
        """Seconds of a step without prefill; where none of its rows generates, with ``tokens`` that do."""
        sizes = _generated(generating) if generating else (1.0, tokens, 0.0)
        return sum(cost * size for cost, size in zip(self._costs, sizes, strict=False))

    @property
    def known(self) -> bool:
        """The costs are those of enough steps that ran."""
        return self._steps >= _ENOUGH

    def generating(self, rows: float, positions: float) -> float:
        """Seconds of a step whose ``rows`` generate and read so many positions together, and of the prefill
        that such steps have had of late."""
        base, row, context, *_ = self._costs
        return base + row * rows + context * positions + self._beside

    def left(self, decoding: float) -> float:
        """Seconds for prefill in a step whose rows that generate take ``decoding``."""
        return max(self.target - decoding, _PREFILL_SHARE * decoding)

    def prefill(self, start: int, length: int) -> float:
        """Seconds of a chunk of ``length`` positions from ``start`` on."""
        *_, token, attention = self._costs
        return length * (token + attention * (start + length / 2))

    def fitting(self, start: int, seconds: float) -> int:
        """The longest chunk from ``start`` on that takes at most ``seconds``; perhaps 0."""
        *_, token, attention = self._costs
        first, seconds = token + attention * start, min(max(0.0, seconds), 1e6)
        return int(2 * seconds / (first + sqrt(first * first + 2 * attention * seconds)))

    def cut(self, decoding: float) -> None:
        """A step has less prefill than without the target; ``decoding``: seconds expected for other rows."""
        self.cut_steps += 1
        self.cut_seconds += decoding


def _generated(rows: Generating) -> tuple[float, float, float]:
    """Whether there is a step at all, tokens of rows that generate, and positions that they read."""
    return 1.0, rows.num_tokens, float(rows.starts.sum())


def _prefilled(rows: tuple[Row, ...]) -> tuple[float, float]:
    """Tokens of prefill, and pairs of one of them and a position before it."""
    tokens = sum(row.length for row in rows)
    return tokens, sum(row.length * (row.start + row.length / 2) for row in rows)
