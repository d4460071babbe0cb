"""Report: figures of outcomes beside one another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.errors import ConfigError, shown
from aioinfer.twin.outcome import Outcome
from aioinfer.twin.sweep import duration

__all__ = ["PERCENTILES", "Figures", "Slo", "as_json", "figures", "table"]

PERCENTILES: Mapping[str, float] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Slo:
    """Service level objectives: what a request must keep to count as served well. Seconds; None: no limit."""

    #: arrival to first token, mean time per output token after the first, arrival to end
    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """From ``ttft=1s,itl=50ms,e2e=30s`` or a part of it. Raises ConfigError."""
        found: dict[str, float] = {}
        names = [each.name for each in fields(cls)]
        for part in text.split(","):
            name, _, value = (each.strip() for each in part.partition("="))
            if name not in names or name in found:
                known = f"{', '.join(names)}, each once, as ttft=1s,itl=50ms"
                raise ConfigError(f"slo has parts {known}; got {shown(part)}")
            found[name] = duration(value, f"{name} of slo")
        return cls(**found)


def _row(title: str, factor: float = 1) -> Any:
    """A figure with the title of its row, or rows by part, in a table, whose unit is a factor away."""
    return field(metadata={"title": title, "factor": factor})


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of an outcome: times in seconds, shares from 0 to 1, None where there is nothing to divide by.
    Times have the keys of :data:`PERCENTILES`, and none without a request that was served."""

    requests: int = _row("requests")
    refused: int = _row("refused")
    #: numbers of failed requests by the name of the error
    failed: Mapping[str, int] = _row("failed: {}")
    #: requests per second that meet the SLO, and their share of all requests
    goodput: float | None = _row("goodput, requests/s")
    met: float | None = _row("meet the SLO, %", 100)
    #: tokens per second; prompts of requests that were served
    output_rate: float | None = _row("output tokens/s")
    prompt_rate: float | None = _row("prompt tokens/s")
    #: arrival to first token, token to token, arrival to end, arrival to first step
    ttft: Mapping[str, float] = _row("TTFT {}, ms", 1000)
    itl: Mapping[str, float] = _row("ITL {}, ms", 1000)
    e2e: Mapping[str, float] = _row("E2E {}, ms", 1000)
    queue: Mapping[str, float] = _row("queue {}, ms", 1000)
    #: share of prompt tokens found in the prefix cache
    hit_rate: float | None = _row("prefix hit rate, %", 100)
    #: mean share of KV pages in use
    pages: float | None = _row("KV pages in use, %", 100)
    retractions: int = _row("retractions")
    #: share of the served seconds in which devices computed
    busy: float | None = _row("devices busy, %", 100)
    #: from the beginning to the end; summed over replicas, those in which one served
    seconds: float = _row("duration, s")
    served: float = _row("served, replica-seconds")
    #: of a million output tokens, in the currency of the price
    cost: float | None = _row("cost per million output tokens")


def figures(outcome: Outcome, slo: Slo | None = None, *, price: float | None = None) -> Figures:
    """Figures of an outcome. Without an SLO, every request that was served meets it. ``price``: of a replica
    for an hour."""
    served, seconds, slo = ~np.isnan(np.asarray(outcome.first)), outcome.seconds, slo or Slo()
    names = ("arrived", "admitted", "first", "ended", "prompt_tokens", "cached_tokens", "output_tokens")
    columns = (np.asarray(getattr(outcome, name))[served] for name in names)
    arrived, admitted, first, ended, prompt, cached, output = columns
    met = np.full(len(first), True)
    per_token = (ended - first) / np.maximum(output - 1, 1)
    for limit, took in ((slo.ttft, first - arrived), (slo.itl, per_token), (slo.e2e, ended - arrived)):
        met &= limit is None or took <= limit
    return Figures(
        requests=len(outcome),
        refused=outcome.errors["Rejected"],
        failed={name: count for name, count in sorted(outcome.errors.items()) if name != "Rejected"},
        goodput=_ratio(met.sum(), seconds),
        met=_ratio(met.sum(), len(outcome)),
        output_rate=_ratio(output.sum(), seconds),
        prompt_rate=_ratio(prompt.sum(), seconds),
        ttft=_percentiles(first - arrived),
        itl={name: outcome.itl.quantile(share) for name, share in PERCENTILES.items() if outcome.itl},
        e2e=_percentiles(ended - arrived),
        queue=_percentiles(admitted - arrived),
        hit_rate=_ratio(cached.sum(), prompt.sum()),
        pages=_ratio(sum(sample[3] for sample in outcome.samples), len(outcome.samples)),
        retractions=outcome.retractions,
        busy=_ratio(outcome.busy, outcome.served),
        seconds=seconds,
        served=outcome.served,
        cost=None if price is None else _ratio(1e6 * price * outcome.served / 3600, output.sum()),
    )


def _ratio(part: float, whole: float) -> float | None:
    return float(part / whole) if whole else None


def _percentiles(seconds: npt.NDArray[np.float64]) -> dict[str, float]:
    return {name: float(np.quantile(seconds, share)) for name, share in PERCENTILES.items() if len(seconds)}


def table(rows: Sequence[tuple[str, Figures]]) -> str:
    """A table in plain text: one column for each (label, figures), units in the names of its rows. What no
    column has is left out, labels too."""
    lines = [["", *parts] for parts in zip_longest(*(label.split(" ") for label, _ in rows), fillvalue="")]
    for each in fields(Figures):
        values = [getattr(found, each.name) for _, found in rows]
        title, factor = each.metadata["title"], each.metadata["factor"]
        if "{}" not in title:
            lines.append([title, *(_cell(value, factor) for value in values)])
            continue
        for part in sorted(set().union(*values)):
            lines.append([title.format(part), *(_cell(value.get(part), factor) for value in values)])
    lines = [line for line in lines if any(cell.strip("-") for cell in line[1:])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line) for line in aligned)


def _cell(value: float | None, factor: float) -> str:
    """A figure in four digits, or in all of a whole number."""
    if value is None:
        return "-"
    decimals = 0 if isinstance(value, int) or not value else max(0, 4 - len(str(int(value * factor))))
    return f"{value * factor:.{decimals}f}"


def as_json(rows: Sequence[tuple[str, Figures]], **facts: Any) -> str:
    """The same as JSON in seconds and shares, with ``facts`` of all columns."""
    found = [{"variant": label, **asdict(each)} for label, each in rows]
    return json.dumps({**facts, "variants": found}, indent=1)
