"""Observing: what follows the requests and steps of a service, as its config and its metrics ask for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aioinfer._version import __version__
from aioinfer.config import EngineConfig
from aioinfer.observe.reporter import Reporter
from aioinfer.observe.tracing import Tracer

if TYPE_CHECKING:
    from aioinfer.loop.service import Service
    from aioinfer.observe.metrics.measuring import Measuring
    from aioinfer.observe.stats import EngineStats

__all__ = ["measure", "observe"]


def observe(service: Service[Any], config: EngineConfig, stats: Callable[[], EngineStats]) -> None:
    """Trace the requests of a service that has just started and log statistics, where the caller's config
    says so."""
    if config.tracing:
        service.observers.add(Tracer(config.model_name, __version__, service.clock))
    if config.stats_interval:
        service.observers.add(Reporter(service.loop, config.stats_interval, stats, service.clock))


def measure(
    service: Service[Any], measuring: Measuring, policy: str, measured: Callable[[], tuple[EngineStats, int]]
) -> None:
    """Begin to record what the metrics of a service are made of. ``measured``: its statistics and backlog."""
    config, info = service.config, service.info
    facts = {
        "version": __version__,
        "device": info.device or info.description,
        "dtype": info.dtype,
        "page_size": str(info.page_size or config.positions_per_page),
        "prefix_cache": str(config.prefix_cache).lower(),
        "policy": policy,
    }
    measuring.begin(service.observers, service.loop, info.max_model_len, facts, measured)
