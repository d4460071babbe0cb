"""EngineStats: a cheap snapshot of what the engine is doing."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of one moment and counts since the start. O(1) to take."""

    state: str
    #: requests being tokenized, waiting for a slot, and holding one
    arriving: int
    waiting: int
    running: int
    #: prompt tokens of the waiting requests
    waiting_tokens: int
    #: KV pages by state; they add up to ``pages_total``
    pages_free: int
    pages_fenced: int
    pages_private: int
    pages_total: int
    steps: int
    steps_in_flight: int
    admitted: int
    finished: int
    retractions: int
    prefill_tokens: int
    decode_tokens: int
    #: tokens computed for requests that had ended meanwhile
    late_tokens: int
    #: seconds since a step last resolved; 0 while there is nothing to do
    stalled: float
