"""Observing: what follows the requests and steps of a runtime, as its config and its metrics ask for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aioinfer._version import __version__
from aioinfer.config import EngineConfig
from aioinfer.observe.reporter import Reporter
from aioinfer.observe.tracing import Tracer

if TYPE_CHECKING:
    from aioinfer.loop.runtime import Runtime
    from aioinfer.observe.metrics.measuring import Measuring

__all__ = ["measure", "observe"]


def observe(runtime: Runtime, config: EngineConfig, measuring: Measuring | None) -> None:
    """Add the observers of a runtime that has just started; ``config`` is the one that the caller gave."""
    clock = runtime.core.clock
    if measuring is not None:
        measure(runtime, measuring)
    if config.tracing:
        runtime.observers.add(Tracer(config.model_name, __version__, clock))
    if config.stats_interval:
        runtime.observers.add(Reporter(runtime.loop, config.stats_interval, runtime.stats, clock))


def measure(runtime: Runtime, measuring: Measuring) -> None:
    """Begin to record what the metrics of a running engine are made of."""
    config, info = runtime.config, runtime.core.info
    facts = {
        "version": __version__,
        "device": info.device or info.description,
        "dtype": info.dtype,
        "page_size": str(info.page_size or config.positions_per_page),
        "prefix_cache": str(config.prefix_cache).lower(),
        "policy": runtime.core.scheduler.queues.waiting.name,
    }
    measuring.begin(runtime.observers, runtime.loop, info.max_model_len, facts, runtime.measured)
