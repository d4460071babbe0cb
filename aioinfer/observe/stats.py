"""EngineStats: a snapshot of the engine's gauges and counters.

A gauge is one line here: a field and where it is read. A counter is a field of
:class:`~aioinfer.scheduling.counters.SchedulerCounters` and a field of the same name here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioinfer.observe.timeline import Timeline
    from aioinfer.scheduling.scheduler import Scheduler

__all__ = ["EngineStats"]


def _gauge(read: Callable[[Any, Any], Any]) -> Any:
    """A field that is read from the scheduler or from the timeline, the two arguments of ``read``."""
    return field(metadata={"read": read})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges of one moment and counts since the start. Taken in O(1).

    Attributes without another unit are counts; ``stalled``, ``host_gap``, ``device_busy``, ``device_gap``,
    ``forward_seconds`` and both ``loop_lag`` are in seconds.
    """

    state: str
    paused: bool
    #: requests that are tokenized, that wait for a slot, and that hold one
    arriving: int
    waiting: int = _gauge(lambda s, _: len(s.queues.waiting))
    running: int = _gauge(lambda s, _: len(s.queues.running))
    #: of the running requests: those in prefill, and those in the decode batch
    prefilling: int = _gauge(lambda s, _: len(s.queues.prefilling))
    decoding: int = _gauge(lambda s, _: len(s.queues.batch))
    #: of the weights: how often they were replaced
    weight_version: int = _gauge(lambda s, _: s.weight_version)
    #: parked requests without pages; they wait for their consumer or their text, not for a slot
    shelved: int = _gauge(lambda s, _: len(s.queues.shelved))
    #: prompt tokens of the waiting requests
    waiting_tokens: int = _gauge(lambda s, _: s.queues.queued_tokens)
    #: KV pages by state; they add up to ``pages_total``
    pages_free: int = _gauge(lambda s, _: s.memory.pages.free)
    pages_fenced: int = _gauge(lambda s, _: s.memory.pages.fenced)
    pages_private: int = _gauge(lambda s, _: s.memory.pages.private)
    pages_cached: int = _gauge(lambda s, _: s.memory.pages.cached)
    pages_total: int = _gauge(lambda s, _: s.memory.pages.total)
    #: cached pages without a reader
    pages_evictable: int = _gauge(lambda s, _: s.memory.evictable)
    steps: int
    steps_in_flight: int
    admitted: int
    finished: int
    retractions: int
    #: retractions in favour of a higher priority
    preemptions: int
    #: restarts of a request because its step ran out of memory
    out_of_memory_retries: int
    #: present limit of tokens per step: ``max_step_tokens``, or less after a step ran out of memory
    step_tokens: int = _gauge(lambda s, _: s.cap.tokens)
    #: parkings of a request because its consumer lagged
    parkings: int
    prefill_tokens: int
    #: steps whose prefill was cut for ``itl_target``, and seconds of them that went to rows that
    #: generate: what prompts took longer for it
    cut_steps: int = _gauge(lambda s, _: s.times.cut_steps)
    cut_seconds: float = _gauge(lambda s, _: s.times.cut_seconds)
    decode_tokens: int
    #: tokens appended to outputs
    output_tokens: int
    #: diffusion models: forwards of all steps; a step of several rounds has several
    forwards: int
    #: diffusion models: forwards over a block, its commit included, summed over requests
    rounds: int
    #: tokens computed for requests that had already ended
    late_tokens: int
    #: rows that sampled nothing because their grammar mask was late or tokens were forced
    deferred_rows: int
    #: output tokens that a grammar forced, appended without sampling
    forced_tokens: int
    #: speculation: rows that verified drafts, their drafts, and the right ones
    verified_rows: int
    drafted_tokens: int
    accepted_tokens: int
    #: tokens of admitted requests, and those of them found in the prefix cache
    queried_tokens: int = _gauge(lambda s, _: s.memory.queried_tokens)
    cached_tokens: int = _gauge(lambda s, _: s.memory.hit_tokens)
    #: models with recurrent state: states kept for cached prefixes, and times a request started from one
    snapshots_cached: int = _gauge(lambda s, _: s.memory.snapshots_cached)
    snapshot_hits: int = _gauge(lambda s, _: s.memory.snapshot_hits)
    #: images, and tiles of images, that were encoded
    encoded_images: int = _gauge(lambda s, _: s.memory.encoded_images)
    #: running requests whose first pages are read from a store; pages that were read so, that should have
    #: been there and were not, and that were stored
    loading: int = _gauge(lambda s, _: len(s.queues.arriving))
    loaded_pages: int = _gauge(lambda s, _: s.memory.transfers.arrived)
    missed_pages: int = _gauge(lambda s, _: s.memory.transfers.failed)
    stored_pages: int = _gauge(lambda s, _: s.memory.transfers.stored)
    #: sessions that are open, and cached tokens that are held for them and as warmed prefixes; pages of these
    #: that were evicted or flushed nevertheless, and holds that ended for ``session_timeout`` or
    #: ``max_held_share``
    sessions: int = 0
    held_tokens: int = _gauge(lambda s, _: s.memory.held_pages * s.memory.pages.page_size)
    held_pages_lost: int = _gauge(lambda s, _: s.memory.held_pages_lost)
    holds_expired: int = 0
    #: LoRA adapters that requests can have; and versions that were replaced or unloaded and are still in use
    adapters_loaded: int = 0
    adapters_draining: int = 0
    policy: str = _gauge(lambda s, _: s.queues.waiting.name)
    #: rounds in which the queue was too long for the policy to sort
    policy_fallbacks: int = _gauge(lambda s, _: s.queues.waiting.fallbacks)
    #: admission rounds that packed, and rounds that were fifo because a bound required it
    packed_rounds: int = _gauge(lambda s, _: s.admitter.packed_rounds)
    forced_rounds: int = _gauge(lambda s, _: s.admitter.forced_rounds)
    #: times a request was held back for a prefix that another request computed
    held_back: int = _gauge(lambda s, _: s.admitter.held)
    #: share of the possible output that admission reserves pages for
    new_token_ratio: float = _gauge(lambda s, _: s.ratio.value)
    #: idle self-checks that found a leaked page or slot; each is logged
    failed_checks: int
    #: seconds since the last resolved step; 0 while the engine is idle
    stalled: float
    #: device busy time over busy time plus idle time between consecutive steps
    overlap_ratio: float = _gauge(lambda _, t: t.overlap().ratio)
    #: idle device seconds per step between consecutive steps
    host_gap: float = _gauge(lambda _, t: t.overlap().gap_per_step)
    #: seconds that the device computed, and that it waited for the host between consecutive steps, in all
    device_busy: float = _gauge(lambda _, t: t.device.busy)
    device_gap: float = _gauge(lambda _, t: t.device.gap)
    #: seconds by part of the forward, summed over all forwards, where the kernels count them
    forward_seconds: Mapping[str, float] = _gauge(lambda _, t: t.device.parts())
    #: seconds between the end of a step and its read on the loop: smoothed, and the maximum
    loop_lag: float = _gauge(lambda _, t: t.lag)
    loop_lag_worst: float = _gauge(lambda _, t: t.lag_worst)

    @property
    def pages_in_use(self) -> int:
        """Pages held by requests or by steps in flight; all other pages can be allocated."""
        return self.pages_total - self.pages_free - self.pages_evictable

    @property
    def rejected_tokens(self) -> int:
        """Drafts that were verified and not right, those after a wrong one included."""
        return self.drafted_tokens - self.accepted_tokens

    @property
    def parts(self) -> Sequence[EngineStats]:
        """Statistics per engine: of this one, or of those of a dispatcher."""
        return (self,)

    @property
    def kv_usage(self) -> float:
        """Share of the pages that are held by requests or by steps in flight."""
        return self.pages_in_use / self.pages_total if self.pages_total else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the tokens of admitted requests that were found in the prefix cache."""
        return self.cached_tokens / self.queried_tokens if self.queried_tokens else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Output tokens per round of a diffusion model; 0 before the first round and for other models."""
        return self.output_tokens / self.rounds if self.rounds else 0.0

    @classmethod
    def of(cls, scheduler: Scheduler, *, timeline: Timeline, **given: Any) -> EngineStats:
        """The gauges and counters of a scheduler and a timeline; ``given`` are the fields of the engine."""
        gauges = {
            item.name: item.metadata["read"](scheduler, timeline)
            for item in fields(cls)
            if "read" in item.metadata
        }
        return cls(**gauges, **asdict(scheduler.queues.counters), **given)
