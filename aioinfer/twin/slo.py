"""Service level objectives: what a request must keep to count as served well."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from aioinfer.config.values import shown
from aioinfer.errors import ConfigError
from aioinfer.twin.arguments import duration
from aioinfer.twin.outcome import Outcome

__all__ = ["Slo", "first_tokens"]


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objectives of a request, in seconds; None: no limit."""

    #: arrival to first token, mean time per output token after the first, arrival to end
    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From ``ttft=1s,itl=50ms,e2e=30s`` or a part of it. Raises ConfigError."""
        found: dict[str, float] = {}
        names = [field.name for field in fields(cls)]
        for part in text.split(","):
            name, _, value = (each.strip() for each in part.partition("="))
            if name not in names:
                raise ConfigError(f"slo has parts {', '.join(names)}, as ttft=1s,itl=50ms; got {shown(part)}")
            if name in found:
                raise ConfigError(f"slo has {name} twice: {shown(text)}")
            found[name] = duration(value, f"{name} of slo")
        return cls(**found)

    def met(self, outcome: Outcome) -> npt.NDArray[np.bool_]:
        """Which requests meet it, bool [requests]; those that were refused or failed do not."""
        first, ended = np.asarray(outcome.first), np.asarray(outcome.ended)
        gaps = np.maximum(np.asarray(outcome.output_tokens) - 1, 1)
        times = (first_tokens(outcome), (ended - first) / gaps, ended - np.asarray(outcome.arrived))
        found: npt.NDArray[np.bool_] = ~np.isnan(first)
        for limit, seconds in zip((self.ttft, self.itl, self.e2e), times, strict=True):
            if limit is not None:
                found &= seconds <= limit
        return found


def first_tokens(outcome: Outcome) -> npt.NDArray[np.float64]:
    """Seconds from arrival to first token, float64 [requests]; NaN of those that were refused or failed."""
    found: npt.NDArray[np.float64] = np.asarray(outcome.first) - np.asarray(outcome.arrived)
    return found
