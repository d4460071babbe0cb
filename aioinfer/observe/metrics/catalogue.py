"""The metrics: name, help, unit, and where the value is read. A new one is one entry here.

Names of our own begin with ``aioinfer_``; promtool keeps colons for recording rules, so vLLM's names with
theirs are a second table, for boards that query them. A value that :class:`EngineStats` has is read from it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aioinfer.ledger import LEDGER
from aioinfer.observe.metrics import histograms
from aioinfer.observe.metrics.recorder import Snapshot

__all__ = ["OWN", "VLLM", "Distribution", "Value"]

_Read = Callable[[Snapshot], float | Mapping[str, float] | None]


@dataclass(frozen=True, slots=True)
class Value:
    """A gauge or counter. ``name`` is without the suffix ``_total`` of counters.

    ``read`` returns one value or, with a ``label``, one for each of its values; None where there is none.
    """

    name: str
    kind: str
    help: str
    read: _Read
    unit: str = ""
    label: str | None = None
    #: the field of EngineStats that it shows
    field: str | None = None


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram of the recorder; ``bounds``: only these of its bounds."""

    name: str
    help: str
    histogram: str
    unit: str = ""
    bounds: Sequence[float] | None = None


def _stat(kind: str, name: str, help: str, field: str = "", *, unit: str = "", label: str = "") -> Value:
    """One that shows a field of EngineStats, by default the one of its name."""
    field = field or name

    def read(snapshot: Snapshot) -> Any:
        return getattr(snapshot.stats, field)

    return Value(f"aioinfer_{name}", kind, help, read, unit, label or None, field)


_gauge, _counter = partial(_stat, "gauge"), partial(_stat, "counter")

#: values of EngineState, the first two of which have no statistics
_STATES = ("new", "starting", "running", "draining", "failed", "closed")


def _states(snapshot: Snapshot) -> Mapping[str, float]:
    return {state: float(state == snapshot.stats.state) for state in _STATES}


def _pages(snapshot: Snapshot) -> Mapping[str, float]:
    stats = snapshot.stats
    return {
        "free": stats.pages_free,
        "fenced": stats.pages_fenced,
        "private": stats.pages_private,
        "cached": stats.pages_cached,
    }


def _memory(what: str) -> _Read:
    def read(snapshot: Snapshot) -> Mapping[str, float]:
        return {name: getattr(entry, what) for name, entry in LEDGER.entries().items()}

    return read


_MEMORY = tuple(
    Value(
        f"aioinfer_memory_{what}_bytes",
        "gauge",
        f"Memory that the whole process {help}.",
        _memory(what),
        "bytes",
        "share",
    )
    for what, help in (("promised", "may take or has taken"), ("taken", "has taken"))
)

_GAUGES = (
    *_MEMORY,
    Value("aioinfer_engine_state", "gauge", "1 for the state the engine is in.", _states, label="state"),
    _gauge("engine_paused", "1 while no steps are launched, by request.", "paused"),
    _gauge("requests_arriving", "Requests whose prompt is being tokenized.", "arriving"),
    _gauge("requests_waiting", "Requests that wait for a slot.", "waiting"),
    _gauge("requests_running", "Requests that hold a slot.", "running"),
    _gauge("requests_prefilling", "Running requests whose prompt is being computed.", "prefilling"),
    _gauge("requests_decoding", "Running requests in the decode batch.", "decoding"),
    _gauge("requests_shelved", "Parked requests without pages.", "shelved"),
    _gauge(
        "waiting_prompt_tokens", "Prompt tokens of the waiting requests.", "waiting_tokens", unit="tokens"
    ),
    Value("aioinfer_kv_pages", "gauge", "KV pages by state.", _pages, unit="pages", label="state"),
    _gauge("kv_capacity_pages", "KV pages in all.", "pages_total", unit="pages"),
    _gauge("kv_evictable_pages", "Cached KV pages without a reader.", "pages_evictable", unit="pages"),
    _gauge(
        "kv_usage_ratio", "Share of KV pages held by requests or steps in flight.", "kv_usage", unit="ratio"
    ),
    _gauge("weight_version", "Version of the weights: how often they were replaced."),
    _gauge("state_snapshots", "Recurrent states kept for cached prefixes.", "snapshots_cached"),
    _gauge("requests_loading", "Requests whose first pages are read from a store.", "loading"),
    _gauge("sessions", "Sessions that are open."),
    _gauge("held_tokens", "Cached tokens that are held for sessions and warmed prefixes."),
    _gauge("adapters_loaded", "LoRA adapters that requests can have."),
    _gauge("adapters_draining", "Adapters that were replaced or unloaded and still hold memory."),
    _gauge("steps_in_flight", "Steps that are launched and not read."),
    _gauge("step_limit_tokens", "Present limit of tokens per step.", "step_tokens", unit="tokens"),
    _gauge("new_token_ratio", "Share of the possible output that admission reserves.", unit="ratio"),
    _gauge("stalled_seconds", "Time since a step was read, 0 while idle.", "stalled", unit="seconds"),
    _gauge("overlap_ratio", "Device time over device time and gaps, since the start.", unit="ratio"),
    _gauge("host_gap_seconds", "Idle device time per step, since the start.", "host_gap", unit="seconds"),
    _gauge(
        "event_loop_lag_smoothed_seconds",
        "Time from the end of a step to its read by the event loop, smoothed.",
        "loop_lag",
        unit="seconds",
    ),
    _gauge(
        "event_loop_lag_worst_seconds",
        "Longest time from the end of a step to its read by the event loop.",
        "loop_lag_worst",
        unit="seconds",
    ),
    Value(
        "aioinfer_stream_backlog_tokens",
        "gauge",
        "Output tokens that the readers of open streams have not taken yet.",
        lambda snapshot: snapshot.backlog,
        unit="tokens",
    ),
)

_COUNTERS = (
    _counter("steps", "Steps launched."),
    _counter("requests_admitted", "Admissions, repeated ones after a retraction included.", "admitted"),
    _counter("requests_finished", "Requests that the scheduler has ended.", "finished"),
    Value(
        "aioinfer_requests_ended",
        "counter",
        "Requests that have ended, by how.",
        lambda snapshot: snapshot.finished,
        label="finish_reason",
    ),
    Value(
        "aioinfer_aborts",
        "counter",
        "Requests that ended before their output did, by cause.",
        lambda snapshot: snapshot.aborts,
        label="cause",
    ),
    Value(
        "aioinfer_rejections",
        "counter",
        "Requests that were refused: the queue was full, or they would have been late.",
        lambda snapshot: snapshot.rejections,
    ),
    _counter("retractions", "Requests that lost their pages and queued again."),
    _counter("preemptions", "Retractions in favour of a higher priority."),
    _counter("out_of_memory_retries", "Restarts of requests whose step ran out of memory."),
    _counter("parkings", "Parkings of requests whose reader or text lagged."),
    _counter("prefill_tokens", "Prompt tokens computed.", unit="tokens"),
    _counter("cut_steps", "Steps whose prefill was cut for itl_target."),
    _counter("cut_seconds", "Time of these for rows that generate: prompts waited.", unit="seconds"),
    _counter("decode_tokens", "Tokens computed one by one or block by block.", unit="tokens"),
    _counter("output_tokens", "Tokens appended to outputs.", unit="tokens"),
    _counter("late_tokens", "Tokens computed for requests that had ended.", unit="tokens"),
    _counter("forced_tokens", "Output tokens that a grammar forced.", unit="tokens"),
    _counter("deferred_rows", "Rows without a sample: late grammar masks, or forced tokens."),
    _counter("speculation_verified_rows", "Rows that verified drafts.", "verified_rows"),
    _counter("speculation_drafted_tokens", "Drafts that were verified.", "drafted_tokens", unit="tokens"),
    _counter("speculation_accepted_tokens", "Of these, the right ones.", "accepted_tokens", unit="tokens"),
    _counter("prefix_cache_queried_tokens", "Tokens of admitted requests.", "queried_tokens", unit="tokens"),
    _counter("prefix_cache_hit_tokens", "Of these, tokens found cached.", "cached_tokens", unit="tokens"),
    _counter("snapshot_hits", "Starts of a request from a kept recurrent state."),
    _counter("encoded_images", "Images, and tiles of images, that were encoded."),
    _counter("loaded_pages", "KV pages that were read from a store and not computed."),
    _counter("missed_pages", "KV pages that a store should have had, and that were computed."),
    _counter("stored_pages", "KV pages that were put into a store."),
    _counter("held_pages_lost", "Pages that were evicted or flushed while they were held."),
    _counter("holds_expired", "Holds that ended for session_timeout or max_held_share."),
    _counter("diffusion_forwards", "Forwards of a diffusion model.", "forwards"),
    _counter("diffusion_rounds", "Forwards over a block, summed over requests.", "rounds"),
    _counter("policy_fallbacks", "Rounds whose queue was too long for the policy to sort."),
    _counter("admission_packed_rounds", "Rounds of admission that packed.", "packed_rounds"),
    _counter("admission_forced_rounds", "Rounds of admission that had to be fifo.", "forced_rounds"),
    _counter("held_back_requests", "Holdings for a prefix that another request computed.", "held_back"),
    _counter("failed_checks", "Idle self-checks that found a page or slot still held."),
    _counter("device_busy_seconds", "Device time of steps that follow steps.", "device_busy", unit="seconds"),
    _counter("device_gap_seconds", "Device time lost between steps.", "device_gap", unit="seconds"),
    _counter("forward_seconds", "Time by part of the forward.", unit="seconds", label="part"),
)

#: values of ReplicaStats.state
_REPLICA_STATES = ("starting", "ready", "silent", "draining", "lost", "closed")


def _replicas(snapshot: Snapshot) -> Mapping[str, float] | None:
    replicas: Any = getattr(snapshot.stats, "replicas", None)
    if replicas is None:
        return None
    states = [each.state for each in replicas]
    return {state: states.count(state) for state in _REPLICA_STATES}


def _dispatched(name: str, help: str, field: str, unit: str = "") -> Value:
    """A counter of dispatchers."""
    return Value(
        f"aioinfer_{name}", "counter", help, lambda snapshot: getattr(snapshot.stats, field, None), unit
    )


#: metrics of dispatchers only
_DISPATCHED = (
    Value("aioinfer_replicas", "gauge", "Engines of a dispatcher by state.", _replicas, label="state"),
    _dispatched("resumed", "Streams of a dispatcher that went on in another engine.", "resumed"),
    _dispatched(
        "resume_seconds",
        "Time from the loss of an engine to the next token, over all its streams.",
        "resume_seconds",
        "seconds",
    ),
    _dispatched("handovers", "Streams that left the engine that had computed their prompts.", "handovers"),
    _dispatched(
        "handovers_without_pages",
        "Of these, those whose KV was computed again.",
        "handovers_without_pages",
    ),
    _dispatched("diverged", "Attempts that brought other tokens than those delivered.", "diverged"),
)


def _seconds(name: str, help: str, histogram: str) -> Distribution:
    return Distribution(f"aioinfer_{name}_seconds", help, histogram, "seconds")


def _sizes(name: str, help: str, histogram: str) -> Distribution:
    return Distribution(f"aioinfer_{name}_tokens", help, histogram, "tokens")


_READ = "From the end of a step to its read by the event loop, one observation per step."
_DISTRIBUTIONS = (
    _seconds("time_to_first_token", "From arrival to the first token.", "ttft"),
    _seconds("inter_token_latency", "Between tokens of a request that were read at different times.", "gap"),
    _seconds(
        "time_per_output_token",
        "Mean time per token after the first one, one observation per request.",
        "per_token",
    ),
    _seconds("request_queue", "From arrival to the first step.", "queued"),
    _seconds("request_prefill", "First step to first token.", "prefill"),
    _seconds("request_decode", "First to last token.", "decode"),
    _seconds("request_inference", "First step to the end.", "inference"),
    _seconds("request", "From arrival to the end.", "whole"),
    _sizes("request_prompt", "Tokens of a prompt.", "prompt_tokens"),
    _sizes("request_output", "Tokens of an output.", "output_tokens"),
    _sizes("request_max", "Parameter max_tokens, where given.", "max_tokens"),
    Distribution("aioinfer_request_choices", "Parameter n of calls of the HTTP API.", "n"),
    _sizes("step", "Tokens computed in a step.", "step_tokens"),
    _seconds("event_loop_lag", _READ, "lag"),
)

OWN: tuple[Value | Distribution, ...] = (*_GAUGES, *_COUNTERS, *_DISPATCHED, *_DISTRIBUTIONS)


def _vllm(kind: str, name: str, help: str, read: _Read, label: str | None = None) -> Value:
    return Value(f"vllm:{name}", kind, help, read, label=label)


def _full(name: str, help: str, histogram: str, bounds: Sequence[float] | None = None) -> Distribution:
    return Distribution(f"vllm:{name}", help, histogram, bounds=bounds)


_latency, _gaps = partial(_full, bounds=histograms.VLLM_LATENCY), partial(_full, bounds=histograms.VLLM_GAP)

#: metrics that boards for vLLM query, with its labels and bounds
VLLM: tuple[Value | Distribution, ...] = (
    _vllm("gauge", "num_requests_running", "Running requests.", lambda s: s.stats.running),
    _vllm("gauge", "num_requests_waiting", "Waiting requests.", lambda s: s.stats.waiting + s.stats.arriving),
    _vllm("gauge", "kv_cache_usage_perc", "KV pages in use; 1 is all.", lambda s: s.stats.kv_usage),
    _vllm("counter", "prompt_tokens", "Prompt tokens computed.", lambda s: s.stats.prefill_tokens),
    _vllm("counter", "generation_tokens", "Output tokens.", lambda s: s.stats.output_tokens),
    _vllm("counter", "request_success", "Ended requests.", lambda s: s.finished, "finished_reason"),
    _vllm("counter", "num_preemptions", "Retractions.", lambda s: s.stats.retractions),
    _vllm("counter", "prefix_cache_queries", "Tokens looked up.", lambda s: s.stats.queried_tokens),
    _vllm("counter", "prefix_cache_hits", "Tokens found cached.", lambda s: s.stats.cached_tokens),
    _vllm("counter", "spec_decode_num_drafts", "Rows with drafts.", lambda s: s.stats.verified_rows),
    _vllm("counter", "spec_decode_num_draft_tokens", "Drafts.", lambda s: s.stats.drafted_tokens),
    _vllm("counter", "spec_decode_num_accepted_tokens", "Right drafts.", lambda s: s.stats.accepted_tokens),
    _full("time_to_first_token_seconds", "From arrival to the first token.", "ttft"),
    _gaps("inter_token_latency_seconds", "Between reads of tokens.", "gap"),
    # Before 0.13, and on older boards, the same under this name.
    _gaps("time_per_output_token_seconds", "Between reads of tokens.", "gap"),
    _gaps("request_time_per_output_token_seconds", "Mean time per token of a request.", "per_token"),
    _latency("e2e_request_latency_seconds", "From arrival to the end.", "whole"),
    _latency("request_queue_time_seconds", "From arrival to the first step.", "queued"),
    _latency("request_prefill_time_seconds", "First step to first token.", "prefill"),
    _latency("request_decode_time_seconds", "First to last token.", "decode"),
    _latency("request_inference_time_seconds", "First step to the end.", "inference"),
    _full("request_prompt_tokens", "Tokens of a prompt.", "prompt_tokens"),
    _full("request_generation_tokens", "Tokens of an output.", "output_tokens"),
    _full("request_params_max_tokens", "Parameter max_tokens, where given.", "max_tokens"),
    _full("request_params_n", "Parameter n.", "n"),
    _full("iteration_tokens_total", "Tokens computed in a step.", "step_tokens"),
)
