"""Pace: the latest moment at which the next step can be planned without the device becoming idle.

With overlap, a step is planned while the one before it is on the device. When it is planned early, a request
that arrives after that waits for the rest of the step in flight and for all of the planned one. When it is
planned late, the device is idle if the loop is busy with something else just then. Steps of the same size
take about the same time, so their ends can be predicted::

    step in flight     ├──────────────────────────────┤
    planned early       │ a request that arrives here waits for two steps
    planned late                                 │ a request that arrives before this waits for one
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioinfer.scheduling.step import Step

__all__ = ["Pace"]

#: seconds that planning, packing and launching may take
_LEAD = 0.005
#: seconds below which a delay is not worth a timer
_WORTH = 0.005
#: factor by which the loop's worst delay decays per step
_FORGET = 0.95


class Pace:
    """Learns how long steps take, by their size, and how late the loop reads their results.

    All times are on the engine's clock, in seconds.
    """

    __slots__ = ("_delay", "_done", "_seconds")

    def __init__(self) -> None:
        self._seconds: dict[tuple[bool, int], float] = {}
        #: when the last step ended
        self._done = 0.0
        self._delay = 0.0

    def landed(self, step: Step, launched: float, now: float, delay: float) -> None:
        """Learn from a step that ended ``delay`` seconds before ``now``."""
        self._delay = max(delay, self._delay * _FORGET)
        took = now - delay - max(launched, self._done)
        self._done = now - delay
        size = _size(step)
        known = self._seconds.get(size, took)
        # Biased towards short estimates: planning too early costs less than planning too late.
        self._seconds[size] = took if took < known else known + (took - known) / 4

    def spare(self, step: Step, launched: float, now: float) -> float:
        """Seconds until the step after this one must be planned; 0 for now.

        It is 0 for sizes that did not occur yet, for steps of blocks, which take any number of rounds, and
        where the loop's recent delays exceed what could be gained.
        """
        if step.multi_step is not None:
            return 0.0
        end = max(launched, self._done) + self._seconds.get(_size(step), 0.0)
        spare = end - now - _LEAD - 2 * self._delay
        return spare if spare > _WORTH else 0.0


def _size(step: Step) -> tuple[bool, int]:
    """Steps within a factor of two, prefill and decode apart."""
    return step.prefill_tokens > 0, step.num_tokens.bit_length()
