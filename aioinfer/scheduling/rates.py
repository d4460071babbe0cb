"""Rates: whether pages come faster from a store or by computing them, as measured."""

from __future__ import annotations

from math import isfinite

__all__ = ["TransferRates"]

_NEWEST = 0.2
#: prefill tokens of a step from which on it tells what a token costs
_LEAST_TOKENS = 16
#: what was slow is tried again: each time that it is passed over, it counts as this much faster
_FORGIVEN = 0.98


class TransferRates:
    """Seconds per token of prefill and of reading, smoothed. What was not measured yet is worth a try."""

    __slots__ = ("prefill", "read")

    def __init__(self) -> None:
        self.prefill: float | None = None
        self.read: float | None = None

    def computed(self, tokens: int, seconds: float) -> None:
        """A step with so many prefill tokens took so long."""
        if tokens >= _LEAST_TOKENS and seconds > 0 and isfinite(seconds):
            self.prefill = _smoothed(self.prefill, seconds / tokens)

    def arrived(self, tokens: int, seconds: float) -> None:
        """So many tokens were read, in this time from the wish on."""
        if tokens > 0:
            self.read = _smoothed(self.read, seconds / tokens)

    def reading_pays(self) -> bool:
        """Reading is faster than computing, as far as that is known."""
        if self.read is None or self.prefill is None or self.read < self.prefill:
            return True
        self.read *= _FORGIVEN
        return False


def _smoothed(known: float | None, newest: float) -> float:
    return newest if known is None else known + _NEWEST * (newest - known)
