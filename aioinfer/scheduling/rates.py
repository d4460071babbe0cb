"""Rates: whether pages come faster from a store or by computing them."""

from __future__ import annotations

from aioinfer.scheduling.step_time import StepTime

__all__ = ["TransferRates"]

_NEWEST = 0.2
#: what was slow is tried again: each time that it is passed over, it counts as this much faster
_FORGIVEN = 0.98


class TransferRates:
    """Seconds per token of reading, smoothed, against what computing takes. What was not measured yet is
    worth a try."""

    __slots__ = ("_times", "read")

    def __init__(self, times: StepTime) -> None:
        self._times = times
        self.read: float | None = None

    def arrived(self, tokens: int, seconds: float) -> None:
        """So many tokens were read, in this time from the wish on."""
        if tokens > 0:
            newest = seconds / tokens
            self.read = newest if self.read is None else self.read + _NEWEST * (newest - self.read)

    def reading_pays(self, start: int, tokens: int) -> bool:
        """Reading ``tokens`` from position ``start`` on is faster than computing, as far as that is known."""
        if (
            self.read is None
            or not self._times.known
            or tokens * self.read < self._times.prefill(start, tokens)
        ):
            return True
        self.read *= _FORGIVEN
        return False
