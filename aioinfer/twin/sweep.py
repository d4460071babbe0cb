"""Sweep: variants of a simulation, from texts such as ``replicas=2..8`` and ``rate=0.5,1,2``, and the other
values that it has from text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aioinfer.config import EngineConfig, ServerConfig, parse_setting, value_names
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    from aioinfer.twin.running import Event, Setup

__all__ = ["SIMULATED", "Variant", "duration", "events", "parse", "variants"]

#: variants of one sweep
_MOST = 1000
_RANGE = re.compile(r"(\d{1,6})\.\.(\d{1,6})(?:\.\.([1-9]\d{0,5}))?", re.ASCII)
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)([a-z]+)", re.ASCII)
_EVENT = re.compile(r"(\d{1,9})@(.*)", re.ASCII)
_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
#: numbers above 0, and the largest of each
_NUMBERS = {"replicas": 10_000, "requests": 10**9, "rate": 10**9, "price": 10**9}
#: what can be varied beside the settings of an engine
_OWN = ("replicas", "routing", "rate")
#: settings of these groups change nothing in a simulation, or are not simulated
_OTHERS = (
    *("gpu_memory_utilization", "kv_dtype", "kv_memory_gib", "prefix_cache_dir", "prefix_cache_disk_gib"),
    *("state_snapshots", "state_snapshot_tokens", "refine_costs", "launch_mode", "switch_interval", "gc"),
    *("max_stop_strings", "max_stop_characters", "max_stop_patterns"),
)
#: settings that change what is simulated
SIMULATED = {"max_model_len", "seed"} | {
    each.name
    for each in fields(EngineConfig)
    if each.metadata["group"] in ("memory", "batching", "scheduling", "overlap", "limits")
    and each.name not in _OTHERS
}


class Variant(NamedTuple):
    """A run of a sweep; the label is empty where nothing is varied."""

    label: str
    setup: Setup
    #: arrivals per time, as a multiple of the load's own
    rate: float


def variants(setup: Setup, rate: float, what_if: Sequence[str]) -> list[Variant]:
    """The product of all ``what_if``: ``NAME=VALUE,VALUE``, where a value can be a range, ``2..8`` or
    ``2..8..2``. Names are replicas, routing, rate and settings of an engine. Raises ConfigError."""
    axes: dict[str, list[str]] = {}
    for text in what_if:
        given, _, values = text.partition("=")
        name = given.strip().replace("-", "_")
        if name not in (*_OWN, *SIMULATED):
            known = f"{', '.join(_OWN)} and settings of scheduling and memory"
            raise ConfigError(f"what-if varies {known} as NAME=VALUE,VALUE; got {shown(text)}")
        if name in axes:
            raise ConfigError(f"what-if varies {name} twice")
        axes[name] = []
        for part in map(str.strip, values.split(",")):
            found = _RANGE.fullmatch(part)
            numbers = range(int(found[1]), int(found[2]) + 1, int(found[3] or 1)) if found else [part]
            if not part or not numbers:
                raise ConfigError(f"what-if {name} has an empty value or range: {shown(values)}")
            axes[name] += map(str, numbers)
    if (count := prod(map(len, axes.values()))) > _MOST:
        raise ConfigError(f"what-if has {count} variants: at most {_MOST} are run")
    return [_variant(setup, rate, dict(zip(axes, each, strict=True))) for each in product(*axes.values())]


def _variant(setup: Setup, rate: float, values: Mapping[str, str]) -> Variant:
    label = " ".join(f"{name}={text}" for name, text in values.items())
    try:
        own: dict[str, Any] = {name: parse(name, values[name]) for name in _OWN if name in values}
        settings = {n: parse_setting(EngineConfig, n, text) for n, text in values.items() if n not in _OWN}
        if settings.get("seed") is not None:
            own["seed"] = settings["seed"]
        if settings.get("costs") is not None:
            from aioinfer.scheduling.costs import Costs

            own["costs"] = Costs.read(Path(settings["costs"]))
        rate = own.pop("rate", rate)
        return Variant(label, replace(setup, **own, config=replace(setup.config, **settings)), rate)
    except ConfigError as error:
        raise ConfigError(f"what-if {label}: {error}") from None


def parse(name: str, text: str | None) -> Any:
    """The name ``routing``, a whole number such as ``replicas``, or another number above 0, such as ``rate``;
    None, if it is not given. Raises ConfigError."""
    if text is None:
        return None
    if name == "routing":
        if text not in (names := value_names(ServerConfig, name)):
            raise ConfigError(f"routing must be one of {', '.join(names)}; got {shown(text)}")
        return text
    whole, most = name in ("replicas", "requests"), _NUMBERS[name]
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = 0
    if not 0 < value <= most:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{name} must be {kind} above 0 and at most {most}, got {shown(text)}")
    return value


def duration(text: str, what: str) -> float:
    """Seconds of ``50ms``, ``1.5s``, ``10min`` or ``2h``. Raises ConfigError that begins with ``what``."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"{what} must be a number with a unit ({', '.join(_UNITS)}), got {shown(text)}")
    return float(found[1]) * _UNITS[found[2]]


def events(kill: Sequence[str], drain: Sequence[str], join: Sequence[str]) -> tuple[Event, ...]:
    """Events by time: from ``2@120s``, replica and time, and those of ``join`` from ``300s``. Raises
    ConfigError."""
    from aioinfer.twin.running import Event

    found = [Event(duration(text, "join"), "join") for text in join]
    given: Any = [*(("kill", text) for text in kill), *(("drain", text) for text in drain)]
    for kind, text in given:
        if (parts := _EVENT.fullmatch(text)) is None:
            raise ConfigError(f"{kind} must be REPLICA@TIME, such as 2@120s; got {shown(text)}")
        found.append(Event(duration(parts[2], f"the time of {kind}"), kind, int(parts[1])))
    return tuple(sorted(found, key=lambda event: event.at))
