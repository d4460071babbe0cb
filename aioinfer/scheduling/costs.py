"""Costs: what steps take on a machine. The one model of it, for planning, drafts, stores and simulations.

The seconds of a step are a sum of five parts, each linear in its coefficients, so that a fit is a problem of
least squares and many decode steps in a row have a closed form::

    base        of any step, and on top of one with prefill
    row         rows that generate: each has logits and a token, and positions that are computed
    context     positions that these read
    token       positions of prefill, on top of those rows
    attention   pairs of a prefill token and one before it

What ``n`` positions cost is a line with knees: kernels compute them in groups, and a GPU is as busy with few
as with some. The features are those of the dynamic chunks of SGLang and vLLM (vllm#41247), and these two.
"""

from __future__ import annotations

from bisect import bisect_right
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    from aioinfer.scheduling.step import Generating, Row, Step

__all__ = ["IDLE", "Costs", "Fit", "HostCosts", "Sizes", "StepCosts", "generated", "prefilled"]


#: seconds, see HostCosts
IDLE = 0.3
#: seconds of anything
_LONGEST = 3600.0


class Sizes(NamedTuple):
    """What the seconds of a step depend on."""

    #: tokens of rows that generate, and positions that these read
    rows: float
    context: float = 0.0
    #: of prefill, and pairs of one of them and a position before it
    tokens: float = 0.0
    pairs: float = 0.0

    @classmethod
    def of(cls, step: Step) -> Self:
        return cls(*generated(step.generating), *prefilled(step.prefilling))


def generated(rows: Generating) -> tuple[float, float]:
    """Tokens of rows that generate, and positions that they read."""
    return rows.num_tokens, float(rows.starts.sum())


def prefilled(rows: tuple[Row, ...]) -> tuple[float, float]:
    """Tokens of prefill, and pairs of one of them and a position before it."""
    tokens = sum(row.length for row in rows)
    return tokens, sum(row.length * (row.start + row.length / 2) for row in rows)


class StepCosts(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Coefficients, in seconds; none is negative."""

    base: float
    row: float
    context: float
    attention: float
    #: of a position, from each of the ``knees`` to the next one; the first knee is 0
    token: tuple[float, ...]
    knees: tuple[int, ...] = (0,)
    #: of a step with prefill, on top of ``base``
    prefill: float = 0.0

    @cached_property
    def _up_to(self) -> list[float]:
        """Seconds of as many positions as each knee says."""
        parts = zip(pairwise(self.knees), self.token, strict=False)
        return [*accumulate((token * (high - low) for (low, high), token in parts), initial=0.0)]

    def positions(self, count: float) -> float:
        """Seconds of so many positions, whatever they read."""
        at = bisect_right(self.knees, count) - 1
        return self._up_to[at] + self.token[at] * (count - self.knees[at])

    def parts(self, sizes: Sizes) -> tuple[float, float, float, float, float]:
        """The five parts, in the order above."""
        rows, context, tokens, pairs = sizes
        alone = self.positions(rows)
        return (
            self.base + (self.prefill if tokens else 0.0),
            self.row * rows + alone,
            self.context * context,
            self.positions(rows + tokens) - alone if tokens else 0.0,
            self.attention * pairs,
        )

    def seconds(self, sizes: Sizes) -> float:
        return sum(self.parts(sizes))


class HostCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the loop does between steps, in seconds: fixed and per row, where there are two."""

    #: to plan, pack and launch a step, and to commit and deliver what it brought
    plan: tuple[float, float] = (0.0, 0.0)
    read: tuple[float, float] = (0.0, 0.0)
    #: from the end of a step until the loop reads it: quantiles at equal distances, one of which is drawn
    notice: tuple[float, ...] = (0.0,)
    #: from a launch until an idle device begins, and how much longer the step takes where that was idle for
    #: IDLE or longer, less after shorter times: caches are cold, and cores sleep
    begin: float = 0.0
    cold: float = 0.0
    #: from a request until it is queued: fixed and per prompt token
    arrive: tuple[float, float] = (0.0, 0.0)


class Fit(msgspec.Struct, frozen=True):
    """How well the costs describe the steps that they come from."""

    steps: int
    #: share of the variance of the steps' seconds that is explained
    r2: float
    #: relative errors of steps that were not used for the fit
    median_error: float
    p90_error: float
    #: smallest and largest size that was measured, by the names of Sizes
    ranges: dict[str, tuple[float, float]]


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file that ``aioinfer calibrate`` writes: of one model on one machine."""

    step: StepCosts
    #: what steps took over what they were expected to: quantiles, as above; of steps with prefill, if these
    #: have others
    noise: tuple[float, ...] = (1.0,)
    prefill_noise: tuple[float, ...] = ()
    host: HostCosts = HostCosts()
    #: what it was measured with: model, processor, version ...
    fingerprint: dict[str, str] = {}
    #: None: not measured, but computed from a specification
    fit: Fit | None = None
    #: settings of the engine, as decided for this machine, and its pages
    engine: dict[str, Any] = {}

    @property
    def extrapolated(self) -> bool:
        """It was not measured on the hardware that it describes."""
        return self.fit is None

    @property
    def description(self) -> str:
        """One line for people."""
        named = ", ".join(self.fingerprint.values())
        if self.fit is None:
            return f"{named} (extrapolated: not measured)"
        return f"{named} ({self.fit.steps} steps, median error {self.fit.median_error:.1%})"

    def outside(self, sizes: Sizes) -> str:
        """The first size that is more than twice as large as all that were measured; empty if none is."""
        ranges = {} if self.fit is None else self.fit.ranges
        sized = zip(sizes._fields, sizes, strict=True)
        return next((name for name, size in sized if size > 2 * ranges.get(name, (0.0, size))[1]), "")

    @classmethod
    def read(cls, path: Path) -> Costs:
        """Raises ConfigError."""
        try:
            found = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise ConfigError(f"costs: {path}: {error.strerror}") from error
        except msgspec.MsgspecError as error:
            raise ConfigError(f"costs: {path} is no file of aioinfer calibrate: {error}") from error
        step, host = found.step, found.host
        values = (step.base, step.row, step.context, step.attention, step.prefill, *step.token)
        values += (*found.noise, *found.prefill_noise)
        values += (*host.plan, *host.read, *host.notice, host.begin, host.cold, *host.arrive)
        rising = len(step.knees) == len(step.token) and [*step.knees] == sorted({0, *step.knees})
        drawn = min(len(found.noise), len(host.notice)) > 0 and max(found.noise) > 0 < max(
            found.prefill_noise or (1.0,)
        )
        if not (rising and drawn and step.base > 0 and all(0 <= each < _LONGEST for each in values)):
            raise ConfigError(f"costs: {path}: costs must be positive, below an hour, and knees rise from 0")
        return found

    def write(self, path: Path) -> None:
        """Raises ConfigError."""
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
