"""Counters: what a scheduler has done since it started."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SchedulerCounters"]


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic counts."""

    steps: int = 0
    admitted: int = 0
    finished: int = 0
    #: requests that lost their pages and queued up again, for whatever reason
    retractions: int = 0
    #: of these, to make room for a request of higher priority
    preemptions: int = 0
    #: times a request started over because its step ran out of memory; most of them are retractions, too
    out_of_memory_retries: int = 0
    #: times a request was parked, because its consumer lagged or its text was behind
    parkings: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    #: forwards of diffusion models: more than one in a step that computed several rounds
    forwards: int = 0
    #: rows of diffusion models that denoised a block, or committed one
    rounds: int = 0
    #: tokens computed for a request that had ended meanwhile
    late_tokens: int = 0
    #: rows that sampled nothing, because of a mask that was late or tokens that were forced
    deferred_rows: int = 0
    #: tokens taken without sampling them, because a grammar left no choice
    forced_tokens: int = 0
    #: rows that verified drafts, these drafts, and those of them that were right
    verified_rows: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
