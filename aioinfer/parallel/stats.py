"""DispatcherStats: statistics of the replicas of a dispatcher, together and one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Self

from aioinfer.observe.metrics.catalogue import OWN, Value
from aioinfer.observe.stats import EngineStats

if TYPE_CHECKING:
    from aioinfer.parallel.replica import Replica

__all__ = ["DispatcherStats", "ReplicaStats"]

#: fields that count from the start of an engine on
_COUNTERS = tuple(
    entry.field
    for entry in OWN
    if isinstance(entry, Value)
    and entry.kind == "counter"
    and entry.field is not None
    and entry.label is None
)
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
    #: its own statistics; None if it is lost
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
    """The sums over the replicas that are not lost: of times since the last step the largest, of ratios the
    mean. ``waiting`` and ``waiting_tokens`` count what waits for a replica, too."""

    replicas: tuple[ReplicaStats, ...]
    #: streams that went on elsewhere, and replies of replicas that differed from what was delivered
    resumed: int
    diverged: int
    #: seconds from losses to the next tokens, in all
    resume_seconds: float

    @classmethod
    def sum_of(
        cls,
        replicas: Sequence[Replica],
        empty: EngineStats,
        *,
        state: str,
        arriving: int,
        waiting: int,
        waiting_tokens: int,
        **own: Any,
    ) -> Self:
        """The sum over replicas, with what waits in front of them. ``empty``: a sum of none; ``own``: the
        fields that only a dispatcher has."""
        each = tuple(map(ReplicaStats.of, replicas))
        total = _summed([one.stats for one in each if one.stats is not None and one.state != "lost"], empty)
        total["state"] = state
        total["arriving"] += arriving
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


def add_counts(past: Counter[str], stats: EngineStats | None) -> None:
    """Keep the counters of an engine that is about to count from 0 again."""
    if stats is not None:
        past.update({name: getattr(stats, name) for name in _COUNTERS})


def with_counts(stats: DispatcherStats, past: Counter[str]) -> DispatcherStats:
    """The same with what is kept, and with what lost engines had counted: counters do not fall."""
    total = Counter(past)
    for each in stats.replicas:
        if each.state == "lost":
            add_counts(total, each.stats)
    return replace(stats, **{name: getattr(stats, name) + total[name] for name in _COUNTERS})


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
            found[item.name] = dict(sum(map(Counter, values), Counter()))
    return found
