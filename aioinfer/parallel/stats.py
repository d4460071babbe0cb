"""DispatcherStats: statistics of the replicas of a dispatcher, together and one by one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self

from aioinfer.observe.metrics.catalogue import OWN, Value
from aioinfer.observe.stats import EngineStats

if TYPE_CHECKING:
    from aioinfer.parallel.replica import Replica

__all__ = ["DispatcherStats", "ReplicaStats"]

#: fields that count from the start of an engine on, of which some are mappings
_COUNTERS = tuple(
    entry.field
    for entry in OWN
    if isinstance(entry, Value) and entry.kind == "counter" and entry.field is not None
)
#: states in which a replica's gauges count
_SERVING = frozenset({"ready", "silent", "draining"})
#: where the largest value counts
_LARGEST = frozenset({"stalled", "loop_lag", "loop_lag_worst", "weight_version"})
#: where the mean does
_MEAN = frozenset({"overlap_ratio", "host_gap", "new_token_ratio"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """One replica at one moment, as its dispatcher knows it."""

    name: str
    #: starting, ready, silent (it is not heard, and gets no new work), draining, lost, or closed
    state: str
    #: why it is lost
    cause: str | None
    #: requests that were sent to it and have not ended, and tokens that it has to compute before first ones
    requests: int
    backlog: int
    #: its own statistics, the last ones that are known; None before its first start
    stats: EngineStats | None

    @classmethod
    def of(cls, replica: Replica) -> Self:
        """At this moment."""
        return cls(
            name=replica.name,
            state=replica.status,
            cause=None if replica.cause is None else str(replica.cause),
            requests=replica.load.requests,
            backlog=replica.load.backlog,
            stats=replica.stats(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatcherStats(EngineStats):
    """Gauges are sums over the replicas that serve: of times since the last step the largest, of ratios the
    mean. ``waiting`` and ``waiting_tokens`` count what waits for a replica, too. Counters never fall: they
    have all that was counted since the start, by engines that were lost, restarted or removed, too, up to the
    last report of one that was killed, which is a quarter of a second old at most."""

    replicas: tuple[ReplicaStats, ...]
    #: streams that went on elsewhere, and replies of replicas that differed from what was delivered
    resumed: int
    diverged: int
    #: seconds from losses to the next tokens, in all
    resume_seconds: float
    #: streams that left the replica that had computed their prompts, and of these, those without their KV
    handovers: int
    handovers_without_pages: int

    @classmethod
    def sum_of(
        cls,
        replicas: Sequence[Replica],
        empty: EngineStats,
        past: Mapping[str, Any],
        *,
        state: str,
        arriving: int,
        sessions: int,
        waiting: int,
        waiting_tokens: int,
        **own: Any,
    ) -> Self:
        """The sum over replicas, with what waits in front of them. ``empty``: a sum of none; ``past``: the
        counters of those that were removed; ``own``: the fields that only a dispatcher has."""
        each = tuple(map(ReplicaStats.of, replicas))
        serving = [one.stats for one in each if one.stats is not None and one.state in _SERVING]
        total, counts = _summed(serving, empty), dict(past)
        for replica in replicas:
            add_counts(counts, counts_of(replica))
        total |= counts
        total["state"] = state
        total["arriving"] += arriving
        total["sessions"] += sessions
        total["waiting"] += waiting
        total["waiting_tokens"] += waiting_tokens
        return cls(**total, **own, replicas=each)

    @property
    def parts(self) -> Sequence[EngineStats]:
        """Statistics of the replicas that take requests."""
        return [each.stats for each in self.replicas if each.state == "ready" and each.stats is not None]

    @property
    def ready_replicas(self) -> int:
        """Replicas that take requests."""
        return sum(each.state == "ready" for each in self.replicas)


def counts_of(replica: Replica) -> dict[str, Any]:
    """Counters of a replica, those of earlier engines in its place included."""
    found, stats = dict(replica.past), replica.stats()
    if stats is not None:
        add_counts(found, {name: getattr(stats, name) for name in _COUNTERS})
    return found


def add_counts(counts: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add counters, numbers and mappings, by their names."""
    for name, value in more.items():
        counts[name] = _together(counts[name], value) if name in counts else value


def _together(one: Any, other: Any) -> Any:
    if isinstance(one, Mapping):
        return {key: one.get(key, 0) + other.get(key, 0) for key in {**one, **other}}
    return one + other


def _summed(each: Sequence[EngineStats], empty: EngineStats) -> dict[str, Any]:
    """The fields of the sum; those of ``empty`` if there is nothing to sum."""
    found: dict[str, Any] = {}
    for item in fields(EngineStats):
        values = [getattr(stats, item.name) for stats in each or (empty,)]
        first = values[0]
        if isinstance(first, bool):
            found[item.name] = all(values)
        elif item.name in _LARGEST:
            found[item.name] = max(values)
        elif item.name in _MEAN:
            found[item.name] = sum(values) / len(values)
        elif isinstance(first, (int, float)):
            found[item.name] = sum(values) if each else type(first)(0)
        elif isinstance(first, str):
            found[item.name] = first
        else:
            found[item.name] = functools.reduce(_together, values)
    return found
