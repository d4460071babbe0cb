"""Observing a dispatcher: metrics, traces and a line of statistics."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from aioinfer._version import __version__
from aioinfer.config import EngineConfig
from aioinfer.observe.observers import Observer, Observers
from aioinfer.observe.reporter import Reporter
from aioinfer.observe.tracing import Tracer
from aioinfer.parallel.local import LocalReplica
from aioinfer.parallel.replica import Replica
from aioinfer.parallel.stats import DispatcherStats

if TYPE_CHECKING:
    from aioinfer.observe.metrics.measuring import Measuring
    from aioinfer.parallel.dispatching import Dispatching
    from aioinfer.scheduling.step import Step

__all__ = ["follow", "measure", "observe"]


def observe(running: Dispatching, config: EngineConfig, stats: Callable[[], DispatcherStats]) -> None:
    """Trace requests and log statistics, where the config says so."""
    if config.tracing:
        running.observers.add(Tracer(config.model_name, __version__, running.clock))
    if config.stats_interval:
        running.observers.add(Reporter(running.loop, config.stats_interval, stats, running.clock))


def measure(
    measuring: Measuring, running: Dispatching, config: EngineConfig, stats: Callable[[], DispatcherStats]
) -> None:
    """Begin to measure requests and steps."""
    info = running.info
    facts = {
        "version": __version__,
        "device": info.device or info.description,
        "dtype": info.dtype,
        "page_size": str(info.page_size or config.positions_per_page),
        "prefix_cache": str(config.prefix_cache).lower(),
        "policy": str(config.policy),
    }
    measuring.begin(
        running.observers, running.loop, info.max_model_len, facts, lambda: (stats(), running.unread)
    )
    for replica in running.placing.ready:
        follow(running, replica)


def follow(running: Dispatching, replica: Replica) -> None:
    """Count the steps of a replica on this loop as steps of the dispatcher."""
    if isinstance(replica, LocalReplica):
        replica.engine.observe(_Steps(running.observers))


class _Steps(Observer):
    """Passes on the steps of an engine."""

    def __init__(self, observers: Observers) -> None:
        self._observers = observers

    def stepped(self, step: Step, lag: float) -> None:
        self._observers.stepped(step, lag)
