"""Collector: the metrics of engines as ``prometheus_client`` collects them. No other module loads it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.utils import floatToGoString

from aioinfer.errors import ConfigError
from aioinfer.observe.metrics.catalogue import OWN, VLLM, Distribution, Value
from aioinfer.observe.metrics.recorder import Snapshot

__all__ = ["Labels", "Measured", "Reading", "attach", "detach", "families", "render"]


#: a bound as other clients of Prometheus write it
_bound: Callable[[float], str] = floatToGoString
_encode_openmetrics: Callable[[CollectorRegistry, str], bytes] = openmetrics.generate_latest


class Labels(NamedTuple):
    """Labels that tell the engines of one registry apart; named as in vLLM."""

    model_name: str
    engine: str


class Reading(NamedTuple):
    """One engine at one moment: its labels, values and facts that do not change."""

    labels: Labels
    snapshot: Snapshot
    facts: Mapping[str, str]


class Measured(Protocol):
    """An engine, as a collector reads it."""

    def reading(self, labels: Labels) -> Reading | None:
        """None while it is not started."""


# -- rendering -----------------------------------------------------------------------------------------


def families(readings: Sequence[Reading], *, vllm: bool) -> Iterator[Metric]:
    """Every metric with its samples, of one engine after the other; also of none, for its name and type."""
    yield _info(readings)
    for entry in (*OWN, *VLLM) if vllm else OWN:
        yield _values(entry, readings) if isinstance(entry, Value) else _distribution(entry, readings)
    if vllm:
        yield _cache_config(readings)


def _info(readings: Iterable[Reading]) -> Metric:
    family = Metric("aioinfer_engine", "What the engine is made of.", "info")
    for labels, _, facts in readings:
        family.add_sample("aioinfer_engine_info", {**labels._asdict(), **facts}, 1.0)
    return family


def _cache_config(readings: Iterable[Reading]) -> Metric:
    family = Metric("vllm:cache_config_info", "Size of the KV cache.", "gauge")
    for labels, snapshot, facts in readings:
        size = {"block_size": facts["page_size"], "num_gpu_blocks": str(snapshot.stats.pages_total)}
        cached = {"enable_prefix_caching": facts["prefix_cache"]}
        family.add_sample(family.name, {**labels._asdict(), **size, **cached}, 1.0)
    return family


def _values(entry: Value, readings: Iterable[Reading]) -> Metric:
    family = Metric(entry.name, entry.help, entry.kind, entry.unit)
    name = f"{entry.name}_total" if entry.kind == "counter" else entry.name
    for labels, snapshot, _ in readings:
        found = entry.read(snapshot)
        if found is None:
            continue
        if isinstance(found, Mapping):
            assert entry.label is not None
            for key, value in found.items():
                family.add_sample(name, {**labels._asdict(), entry.label: key}, float(value))
        else:
            family.add_sample(name, labels._asdict(), float(found))
    return family


def _distribution(entry: Distribution, readings: Iterable[Reading]) -> Metric:
    family = Metric(entry.name, entry.help, "histogram", entry.unit)
    for labels, snapshot, _ in readings:
        counts, own = snapshot.histograms[entry.histogram], labels._asdict()
        for bound, so_far in counts.cumulative(entry.bounds):
            le = _bound(bound)
            family.add_sample(f"{entry.name}_bucket", {**own, "le": le}, float(so_far))
        every = float(sum(counts.counts))
        family.add_sample(f"{entry.name}_bucket", {**own, "le": "+Inf"}, every)
        family.add_sample(f"{entry.name}_count", own, every)
        family.add_sample(f"{entry.name}_sum", own, counts.total)
    return family


def render(readings: Sequence[Reading], accept: str, *, vllm: bool) -> tuple[bytes, str]:
    """The body of a scrape and its content type: text, or OpenMetrics if ``accept`` asks for it.

    Takes some milliseconds, and imports what it needs the first time: not on the loop.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Once(readings, vllm))
    try:
        encode, content_type = choose_encoder(accept)
    except (TypeError, ValueError):  # a version that is no number
        encode, content_type = choose_encoder("")
    if content_type.startswith("application/openmetrics-text"):
        # Our names need no escaping, and by default samples lose their colons, of vLLM's names, without
        # their metadata doing so (prometheus/client_python#1177).
        return _encode_openmetrics(registry, openmetrics.ALLOWUTF8), openmetrics.CONTENT_TYPE_LATEST
    return encode(registry), content_type


class _Once:
    """A collector of readings that were taken before."""

    def __init__(self, readings: Sequence[Reading], vllm: bool) -> None:
        self._readings = readings
        self._vllm = vllm

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        return families(self._readings, vllm=self._vllm)


# -- registries of applications ------------------------------------------------------------------------


class _Engines:
    """The collector of all engines in one registry: a metric's samples have to be together."""

    def __init__(self, *, vllm: bool) -> None:
        self.vllm = vllm
        # A registry does not keep an engine, and with it a model, that was dropped without being closed.
        self.engines: dict[Labels, weakref.ref[Measured]] = {}

    def describe(self) -> Iterable[Metric]:
        """Names only, without asking an engine."""
        return families([], vllm=self.vllm)

    def collect(self) -> Iterable[Metric]:
        found = [(labels, engine()) for labels, engine in list(self.engines.items())]
        readings = [engine.reading(labels) for labels, engine in found if engine is not None]
        return families([each for each in readings if each is not None], vllm=self.vllm)

    def live(self) -> dict[Labels, Measured]:
        """The engines that still exist; the others are forgotten."""
        found = {labels: engine() for labels, engine in self.engines.items()}
        self.engines = {labels: self.engines[labels] for labels, each in found.items() if each is not None}
        return {labels: each for labels, each in found.items() if each is not None}


#: registry -> collector; forgotten with the registry
_COLLECTORS: weakref.WeakKeyDictionary[CollectorRegistry, _Engines] = weakref.WeakKeyDictionary()


def attach(registry: CollectorRegistry, engine: Measured, labels: Labels, *, vllm: bool) -> None:
    """Show an engine's metrics in a registry until :func:`detach`.

    Raises ConfigError: the engine or its labels are there already, other engines there have or have not the
    names of vLLM, or one of the names is another collector's.
    """
    collector = _COLLECTORS.get(registry)
    if collector is None:
        collector = _Engines(vllm=vllm)
        try:
            registry.register(collector)
        except ValueError as error:
            raise ConfigError(f"the registry has a metric of the same name: {error}") from error
        _COLLECTORS[registry] = collector
    live = collector.live()
    if any(each is engine for each in live.values()):
        raise ConfigError("the engine is in this registry already")
    if labels in live:
        raise ConfigError(
            f"the registry has an engine {labels.engine!r} of the model {labels.model_name!r} already: "
            "name this one with register(registry, engine=...)"
        )
    if live and collector.vllm != vllm:
        there = "have" if collector.vllm else "do not have"
        raise ConfigError(f"the other engines of the registry {there} vLLM's names: vllm must be the same")
    if collector.vllm != vllm:  # of engines that are gone
        registry.unregister(collector)
        del _COLLECTORS[registry]
        attach(registry, engine, labels, vllm=vllm)
        return
    collector.engines[labels] = weakref.ref(engine)


def detach(registry: CollectorRegistry, engine: Measured) -> bool:
    """Undo :func:`attach`; False if the engine is not in the registry. The last one takes the names along."""
    collector = _COLLECTORS.get(registry)
    live = {} if collector is None else collector.live()
    found = next((labels for labels, each in live.items() if each is engine), None)
    if collector is not None and found is not None:
        del collector.engines[found]
    if collector is not None and not collector.engines:
        registry.unregister(collector)
        del _COLLECTORS[registry]
    return found is not None
