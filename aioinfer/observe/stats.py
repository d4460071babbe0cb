"""EngineStats: a cheap snapshot of what the engine is doing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aioinfer.observe.timeline import Timeline
    from aioinfer.scheduling.scheduler import Scheduler

__all__ = ["EngineStats"]


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of one moment and counts since the start. O(1) to take."""

    state: str
    paused: bool
    #: requests being tokenized, waiting for a slot, and holding one
    arriving: int
    waiting: int
    running: int
    #: of the running: prompts under way, and requests in the decode batch
    prefilling: int
    decoding: int
    #: parked requests that lost their pages; they wait for their consumer, not for a slot
    shelved: int
    #: prompt tokens of the waiting requests
    waiting_tokens: int
    #: KV pages by state; they add up to ``pages_total``
    pages_free: int
    pages_fenced: int
    pages_private: int
    pages_cached: int
    pages_total: int
    #: of the cached pages, those that nobody reads
    pages_evictable: int
    steps: int
    steps_in_flight: int
    admitted: int
    finished: int
    retractions: int
    #: retractions in favour of a higher priority
    preemptions: int
    #: times a request started over because its step ran out of memory
    out_of_memory_retries: int
    #: tokens that a step may have now: ``max_step_tokens``, or fewer after it ran out of memory
    step_tokens: int
    #: times a request was parked because its consumer lagged
    parkings: int
    prefill_tokens: int
    decode_tokens: int
    #: tokens that requests have been given
    output_tokens: int
    #: of diffusion models: forwards of all steps, more than one where a step computed several rounds
    forwards: int
    #: of diffusion models: forwards over a block, those that commit it included, summed over requests
    rounds: int
    #: tokens computed for requests that had ended meanwhile
    late_tokens: int
    #: rows that sampled nothing because a grammar was late or left no choice
    deferred_rows: int
    #: output tokens that a grammar forced, taken without sampling
    forced_tokens: int
    #: tokens of admitted requests, and how many of them needed no computing
    queried_tokens: int
    cached_tokens: int
    policy: str
    #: rounds in which the policy found too many waiting to sort them
    policy_fallbacks: int
    #: rounds of admission that packed, and that were fifo because the bounds said so
    packed_rounds: int
    forced_rounds: int
    #: times a request was held back for a prefix that another was computing
    held_back: int
    #: share of possible output that admission keeps pages for
    new_token_ratio: float
    #: idle self-checks that found something held by nobody; each was logged
    failed_checks: int
    #: seconds since a step last resolved; 0 while there is nothing to do
    stalled: float
    #: share of the time in which the device computes while there is something to compute
    overlap_ratio: float
    #: seconds of idle device per step, meanwhile
    host_gap: float
    #: seconds that each part of all forwards has taken, where the kernels count them
    forward_seconds: Mapping[str, float]
    #: seconds until the loop reads a result that is there: smoothed, and the worst
    loop_lag: float
    loop_lag_worst: float

    @property
    def pages_in_use(self) -> int:
        """Pages that requests or steps in flight hold; all others can be had."""
        return self.pages_total - self.pages_free - self.pages_evictable

    @property
    def hit_rate(self) -> float:
        """Share of the tokens of admitted requests that were found in the prefix cache."""
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Output tokens by round of a diffusion model; 0 before there are any, and for other models."""
        return self.output_tokens / self.rounds if self.rounds else 0.0

    @classmethod
    def of(
        cls,
        scheduler: Scheduler,
        *,
        output_tokens: int,
        state: str,
        paused: bool,
        arriving: int,
        steps_in_flight: int,
        failed_checks: int,
        stalled: float,
        timeline: Timeline,
    ) -> EngineStats:
        """What the scheduler says, and what only the engine knows."""
        counters, memory, admitter = scheduler.queues.counters, scheduler.memory, scheduler.admitter
        pages = memory.pages
        return cls(
            state=state,
            paused=paused,
            arriving=arriving,
            waiting=len(scheduler.queues.waiting),
            running=len(scheduler.queues.running),
            prefilling=len(scheduler.queues.prefilling),
            decoding=len(scheduler.queues.batch),
            shelved=len(scheduler.queues.shelved),
            waiting_tokens=scheduler.queues.queued_tokens,
            pages_free=pages.free,
            pages_fenced=pages.fenced,
            pages_private=pages.private,
            pages_cached=pages.cached,
            pages_total=pages.total,
            pages_evictable=memory.evictable,
            steps_in_flight=steps_in_flight,
            step_tokens=scheduler.cap.tokens,
            **asdict(counters),
            output_tokens=output_tokens,
            queried_tokens=memory.queried_tokens,
            cached_tokens=memory.hit_tokens,
            policy=scheduler.queues.waiting.name,
            policy_fallbacks=scheduler.queues.waiting.fallbacks,
            packed_rounds=admitter.packed_rounds,
            forced_rounds=admitter.forced_rounds,
            held_back=admitter.held,
            new_token_ratio=scheduler.ratio.value,
            failed_checks=failed_checks,
            stalled=stalled,
            overlap_ratio=timeline.overlap().ratio,
            host_gap=timeline.overlap().gap_per_step,
            forward_seconds=timeline.device.parts(),
            loop_lag=timeline.lag,
            loop_lag_worst=timeline.lag_worst,
        )
