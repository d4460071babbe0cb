"""Arguments: values of a simulation from text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from aioinfer.config import ServerConfig, value_names
from aioinfer.config.values import shown
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    from aioinfer.twin.running import Event

__all__ = ["duration", "events", "parse"]

_UNITS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+\.?\d*|\.\d+)([a-z]+)", re.ASCII)
#: what is counted, and its largest number
_COUNTED = {"replicas": 10_000, "requests": 1_000_000_000}
_LARGEST = 1_000_000_000


def duration(text: str, what: str) -> float:
    """Seconds of ``50ms``, ``1.5s``, ``10min`` or ``2h``. Raises ConfigError that begins with ``what``."""
    found = _DURATION.fullmatch(text.strip())
    if found is None or found[2] not in _UNITS:
        raise ConfigError(f"{what} must be a number with a unit ({', '.join(_UNITS)}), got {shown(text)}")
    return float(found[1]) * _UNITS[found[2]]


def parse(name: str, text: str) -> int | float | str:
    """The name ``routing``, a whole number such as ``replicas``, or another number above 0, such as ``rate``.
    Raises ConfigError."""
    if name == "routing":
        names = value_names(ServerConfig, name)
        if text not in names:
            raise ConfigError(f"routing must be one of {', '.join(names)}; got {shown(text)}")
        return text
    try:
        value = int(text) if name in _COUNTED else float(text)
    except ValueError:
        value = 0
    most = _COUNTED.get(name, _LARGEST)
    if not 0 < value <= most:
        kind = "a whole number" if name in _COUNTED else "a number"
        raise ConfigError(f"{name} must be {kind} above 0 and at most {most}, got {shown(text)}")
    return value


def events(kill: Sequence[str], drain: Sequence[str], join: Sequence[str]) -> tuple[Event, ...]:
    """Events by time: from ``2@120s``, replica and time, and those of ``join`` from ``300s``. Raises
    ConfigError."""
    from aioinfer.twin.running import Event

    found = [Event(duration(text, "join"), "join") for text in join]
    given: dict[Literal["kill", "drain"], Sequence[str]] = {"kill": kill, "drain": drain}
    for kind, texts in given.items():
        for text in texts:
            replica, _, at = text.partition("@")
            if not re.fullmatch("[0-9]{1,9}", replica):
                raise ConfigError(f"{kind} must be REPLICA@TIME, such as 2@120s; got {shown(text)}")
            found.append(Event(duration(at, f"the time of {kind}"), kind, int(replica)))
    return tuple(sorted(found, key=lambda event: event.at))
