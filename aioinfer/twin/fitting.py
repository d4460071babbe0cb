"""Fitting: from recorded steps to costs, by non-negative least squares of relative errors.

As the error of a step counts by its share, short steps are as well described as long ones; as no cost is
negative, none makes up for another, and what follows beyond the measured sizes is never absurd.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from aioinfer.errors import ConfigError
from aioinfer.scheduling.costs import IDLE, Fit, HostCosts, Sizes, StepCosts
from aioinfer.twin.recording import RecordedStep

__all__ = ["WARM", "fit_host", "fit_steps", "idle_before", "line", "nnls", "seconds_of"]

_Floats = npt.NDArray[np.float64]

#: positions at which the cost of one more may change
_KNEES = (0, 1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
#: steps that a cost between two knees must be seen in
_SEEN = 12
#: of these, one is kept back to judge the fit
_HELD_OUT = 5
#: of noise
_QUANTILES = 64
#: seconds for which a device may have been idle before steps that are fitted
WARM = 0.02
#: a step that took this multiple of its time was disturbed by something that is not the engine's
_DISTURBED = 4.0


def nnls(matrix: _Floats, target: _Floats) -> _Floats:
    """The x >= 0 with the least ``|matrix x - target|``, by active sets (Lawson and Hanson, Solving Least
    Squares Problems, 1974, chapter 23)."""
    count = matrix.shape[1]
    found, passive = np.zeros(count), np.zeros(count, bool)
    for _ in range(10 * count):
        gradient = matrix.T @ (target - matrix @ found)
        gradient[passive] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10 * float(np.abs(target).sum()):
            break
        passive[best] = True
        while True:
            tried = np.zeros(count)
            tried[passive] = np.linalg.lstsq(matrix[:, passive], target, rcond=None)[0]
            below = passive & (tried <= 0)
            if not below.any():
                break
            share = float((found[below] / np.maximum(found[below] - tried[below], 1e-300)).min())
            found = found + share * (tried - found)
            passive &= found > 1e-15
            found[~passive] = 0.0
        found = tried
    return found


def seconds_of(steps: Sequence[RecordedStep]) -> _Floats:
    """What each step took on the device: from the end of the one before, or, where that was idle, from its
    own beginning."""
    begun, ended = (np.array([getattr(step, name) for step in steps]) for name in ("begun", "ended"))
    took: _Floats = ended - begun
    took[1:] = np.where(idle_before(steps)[1:] >= 0, took[1:], ended[1:] - ended[:-1])
    return took


def idle_before(steps: Sequence[RecordedStep]) -> _Floats:
    """Seconds that the device had been idle when each step was launched; negative: it was not."""
    ended = np.array([-np.inf, *(step.ended for step in steps[:-1])])
    idle: _Floats = np.array([step.launched for step in steps]) - ended
    return idle


def fit_steps(steps: Sequence[Sizes], seconds: _Floats) -> tuple[StepCosts, list[tuple[float, ...]], Fit]:
    """Costs of steps, the noise of those without and with prefill, and how good the costs are. Raises
    ConfigError: there are too few."""
    if len(steps) < 4 * _HELD_OUT:
        raise ConfigError(f"a fit needs {4 * _HELD_OUT} steps or more, got {len(steps)}")
    sizes = np.array(steps, float)
    held = np.arange(len(steps)) % _HELD_OUT == _HELD_OUT - 1
    knees = _knees(sizes[~held, 0] + sizes[~held, 2])
    features = _features(sizes, knees)
    used, weights = ~held, 1 / seconds
    for _ in range(3):
        # Weighted by what is expected, the mean is met; weighted by what was measured, it is missed by noise.
        weighted = features[used] * weights[used, None]
        scale = np.maximum(np.linalg.norm(weighted, axis=0), 1e-300)
        found = nnls(weighted / scale, seconds[used] * weights[used]) / scale
        expected = np.maximum(features @ found, 1e-9)
        used, weights = ~held & (seconds < _DISTURBED * expected), 1 / expected
    base, prefill, row, context, attention, *token = (float(each) for each in found)
    base = max(base, 1e-9)
    costs = StepCosts(base, row, context, attention, tuple(token), knees, prefill)
    errors = np.abs(expected[held] / seconds[held] - 1)
    unexplained = float(((seconds[held] - expected[held]) ** 2).sum())
    total = float(((seconds[held] - seconds[held].mean()) ** 2).sum())
    bounds = zip(Sizes._fields, sizes.min(0).tolist(), sizes.max(0).tolist(), strict=True)
    ranges = {name: (low, high) for name, low, high in bounds}
    r2 = 1 - unexplained / total if total else 1.0
    p90, counted = float(np.quantile(errors, 0.9)), used | held
    kinds = [counted & (sizes[:, 2] == 0), counted & (sizes[:, 2] > 0)]
    noise = [quantiles((seconds * weights)[of if of.any() else counted]) for of in kinds]
    return costs, noise, Fit(len(steps), r2, float(np.median(errors)), p90, ranges)


def _knees(positions: _Floats) -> tuple[int, ...]:
    """Those between which enough steps lie, with something beyond the last one."""
    found = [0]
    for knee in _KNEES[1:]:
        if min(((positions > found[-1]) & (positions <= knee)).sum(), (positions > knee).sum()) >= _SEEN:
            found.append(knee)
    return tuple(found)


def _features(sizes: _Floats, knees: tuple[int, ...]) -> _Floats:
    """A column for each coefficient of StepCosts."""
    rows, context, tokens, pairs = sizes.T
    columns = [np.ones(len(sizes)), (tokens > 0).astype(float), rows, context, pairs]
    for low, high in pairwise((*knees, np.inf)):
        columns.append(np.clip(rows + tokens, low, high) - low)
    return np.stack(columns, 1)


def quantiles(values: _Floats) -> tuple[float, ...]:
    """Those in the middle of equal shares: drawn alike, they have the values' mean and spread."""
    shares = (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return tuple(float(each) for each in np.quantile(values, shares))


def line(sizes: _Floats, seconds: _Floats) -> tuple[float, float]:
    """Fixed seconds, and seconds per unit of size: plain least squares, as their sum is what matters."""
    fixed, each = nnls(np.stack([np.ones(len(sizes)), sizes], 1), seconds)
    return float(fixed), float(each)


def fit_host(steps: Sequence[RecordedStep], costs: StepCosts) -> HostCosts:
    """What the loop takes between steps with these costs."""
    rows = np.array([len(step.generating) + len(step.prefilling) for step in steps], float)
    plan = line(rows, np.array([step.launched - step.planned for step in steps]))
    read = line(rows, np.array([step.delivered - step.read for step in steps]))
    notice = quantiles(np.array([max(0.0, step.read - step.ended) for step in steps]))
    idle, begun = idle_before(steps), np.array([step.begun - step.launched for step in steps])
    warm = (idle >= 0) & (idle < WARM)
    begin = float(np.median(begun[warm])) if warm.any() else 0.0
    took, expected = seconds_of(steps), np.array([costs.seconds(step.sizes) for step in steps])
    late = (begun - begin + took - np.median(took / expected) * expected)[idle >= IDLE]
    cold = max(0.0, float(np.median(late))) if len(late) else 0.0
    return HostCosts(plan=plan, read=read, notice=notice, begin=begin, cold=cold)
