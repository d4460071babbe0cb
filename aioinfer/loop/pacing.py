"""Pace: when the next step has to be planned for the device not to wait.

With a window, a step is planned while the one before is on the device. Done early, who arrives after it waits
for the rest of the step under way and for all of the one that was planned. Done late, the device stands still
when the loop is busy with something else. Steps of a size take about the same time, so both can be avoided::

    step under way     ├──────────────────────────────┤
    planned early       │ who arrives here waits for two steps
    planned late                                 │ and here for one: from here on ``lead`` is left
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioinfer.scheduling.step import Step

__all__ = ["Pace"]

#: seconds that planning, packing and launching may take
_LEAD = 0.005
#: seconds below which waiting gains nobody anything
_WORTH = 0.005
#: of the loop's worst delay, what is left after a step
_FORGET = 0.95


class Pace:
    """How long steps take, by their size, and how late the loop is to notice their ends.

    All times are the loop's, in seconds.
    """

    __slots__ = ("_delay", "_done", "_seconds")

    def __init__(self) -> None:
        self._seconds: dict[tuple[bool, int], float] = {}
        #: when a step ended last
        self._done = 0.0
        self._delay = 0.0

    def landed(self, step: Step, launched: float, now: float, delay: float) -> None:
        """A step is over; the loop heard of it so many seconds later."""
        self._delay = max(delay, self._delay * _FORGET)
        took = now - delay - max(launched, self._done)
        self._done = now - delay
        size = _size(step)
        known = self._seconds.get(size, took)
        # Rather too little: who plans too early loses less than who plans too late.
        self._seconds[size] = took if took < known else known + (took - known) / 4

    def spare(self, step: Step, launched: float, now: float) -> float:
        """Seconds until the step behind this one must be planned; not above 0 if that is now.

        That is so for sizes that did not occur yet, for blocks, whose steps take any number of rounds, and
        where the loop has lately been late by as much as could be gained.
        """
        if step.multi_step is not None:
            return 0.0
        end = max(launched, self._done) + self._seconds.get(_size(step), 0.0)
        spare = end - now - _LEAD - 2 * self._delay
        return spare if spare > _WORTH else 0.0


def _size(step: Step) -> tuple[bool, int]:
    """Steps within a factor of two, prefill and decode apart."""
    return step.prefill_tokens > 0, step.num_tokens.bit_length()
