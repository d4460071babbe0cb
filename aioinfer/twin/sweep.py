"""Sweep: variants of a simulation, from texts such as ``replicas=2..8`` and ``rate=0.5,1,2``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from aioinfer.config import EngineConfig, parse_setting
from aioinfer.config.values import shown
from aioinfer.errors import ConfigError
from aioinfer.scheduling.costs import Costs
from aioinfer.twin.arguments import parse

if TYPE_CHECKING:
    from aioinfer.twin.running import Setup

__all__ = ["OWN", "Variant", "variants"]

#: variants of one sweep
_MOST = 1000
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})(?:\.\.(\d{1,9}))?", re.ASCII)
#: what can be varied beside the settings of an engine; a seed is one of them, too
OWN = ("replicas", "routing", "rate")


class Variant(NamedTuple):
    """A run of a sweep; the label is empty where nothing is varied."""

    label: str
    setup: Setup
    #: arrivals per time, as a multiple of the load's own
    rate: float


def variants(setup: Setup, rate: float, what_if: Sequence[str]) -> list[Variant]:
    """The product of all ``what_if``: ``NAME=VALUE,VALUE``, where a value can be a range, ``2..8`` or
    ``2..8..2``. Names are replicas, routing, rate and settings of an engine. Raises ConfigError."""
    names = (*OWN, *(field.name for field in fields(EngineConfig)))
    axes: dict[str, list[str]] = {}
    for text in what_if:
        given, _, values = text.partition("=")
        name = given.strip().replace("-", "_")
        if name not in names:
            known = f"{', '.join(OWN)} and settings of an engine"
            raise ConfigError(f"what-if varies {known} as NAME=VALUE,VALUE; got {shown(text)}")
        if name in axes:
            raise ConfigError(f"what-if varies {name} twice")
        axes[name] = list(_values(name, values))
    count = prod(map(len, axes.values()))
    if count > _MOST:
        raise ConfigError(f"what-if has {count} variants: at most {_MOST} are run")
    return [_variant(setup, rate, dict(zip(axes, each, strict=True))) for each in product(*axes.values())]


def _values(name: str, text: str) -> Iterator[str]:
    for part in map(str.strip, text.split(",")):
        found = _RANGE.fullmatch(part)
        if found is None:
            if not part:
                raise ConfigError(f"what-if {name} has an empty value: {shown(text)}")
            yield part
            continue
        low, high, step = int(found[1]), int(found[2]), int(found[3] or 1)
        if low > high or step < 1 or (high - low) // step >= _MOST:
            raise ConfigError(f"what-if {name}: {part} has no values, or more than {_MOST}")
        yield from map(str, range(low, high + 1, step))


def _variant(setup: Setup, rate: float, values: Mapping[str, str]) -> Variant:
    label = " ".join(f"{name}={text}" for name, text in values.items())
    try:
        own: dict[str, Any] = {name: parse(name, values[name]) for name in values if name in OWN}
        settings = {n: parse_setting(EngineConfig, n, text) for n, text in values.items() if n not in OWN}
        if settings.get("seed") is not None:
            own["seed"] = settings["seed"]
        if settings.get("costs") is not None:
            own["costs"] = Costs.read(Path(settings["costs"]))
        rate = own.pop("rate", rate)
        return Variant(label, replace(setup, **own, config=replace(setup.config, **settings)), rate)
    except ConfigError as error:
        raise ConfigError(f"what-if {label}: {error}") from None
