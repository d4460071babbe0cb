"""Report: figures of outcomes beside one another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from aioinfer.errors import Rejected
from aioinfer.twin.outcome import Outcome
from aioinfer.twin.slo import Slo, first_tokens

__all__ = ["PERCENTILES", "Figures", "Slo", "as_json", "figures", "table"]

PERCENTILES: Mapping[str, float] = {"p50": 0.5, "p95": 0.95, "p99": 0.99}

#: name of the error of a request that was refused
_REFUSED = Rejected.__name__
#: rows of a table: title, field and part of it, factor
_ABOVE = (("requests", "requests", 1), ("refused", "refused", 1))
_BELOW = (
    ("goodput, requests/s", "goodput", 1),
    ("meet the SLO, %", "met", 100),
    ("output tokens/s", "output_rate", 1),
    ("prompt tokens/s", "prompt_rate", 1),
    *((f"TTFT {name}, ms", f"ttft.{name}", 1000) for name in PERCENTILES),
    *((f"ITL {name}, ms", f"itl.{name}", 1000) for name in PERCENTILES),
    *((f"E2E {name}, ms", f"e2e.{name}", 1000) for name in PERCENTILES),
    *((f"queue {name}, ms", f"queue.{name}", 1000) for name in PERCENTILES),
    ("prefix hit rate, %", "hit_rate", 100),
    ("KV pages in use, %", "pages", 100),
    ("retractions", "retractions", 1),
    ("devices busy, %", "busy", 100),
    ("duration, s", "seconds", 1),
    ("served, replica-seconds", "served", 1),
    ("cost per million output tokens", "cost", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of an outcome: times in seconds, shares from 0 to 1, None where there is nothing to divide by.
    Times have the keys of :data:`PERCENTILES`, and none without a request that was served."""

    requests: int
    refused: int
    #: numbers of failed requests by the name of the error
    failed: Mapping[str, int]
    #: requests per second that meet the SLO, and their share of all requests
    goodput: float | None
    met: float | None
    #: tokens per second; prompts of requests that were served
    output_rate: float | None
    prompt_rate: float | None
    #: arrival to first token, token to token, arrival to end, arrival to first step
    ttft: Mapping[str, float]
    itl: Mapping[str, float]
    e2e: Mapping[str, float]
    queue: Mapping[str, float]
    #: share of prompt tokens found in the prefix cache
    hit_rate: float | None
    #: mean share of KV pages in use
    pages: float | None
    retractions: int
    #: share of the served seconds in which devices computed
    busy: float | None
    #: from the beginning to the end; summed over replicas, those in which one served
    seconds: float
    served: float
    #: of a million output tokens, in the currency of the price
    cost: float | None


def figures(outcome: Outcome, slo: Slo | None = None, *, price: float | None = None) -> Figures:
    """Figures of an outcome. Without an SLO, every request that was served meets it. ``price``: of a replica
    for an hour."""
    met, firsts, arrived = (slo or Slo()).met(outcome), first_tokens(outcome), np.asarray(outcome.arrived)
    served, seconds = ~np.isnan(firsts), outcome.seconds
    prompt, output = int(np.asarray(outcome.prompt_tokens)[served].sum()), sum(outcome.output_tokens)
    return Figures(
        requests=len(outcome),
        refused=outcome.errors[_REFUSED],
        failed={name: count for name, count in sorted(outcome.errors.items()) if name != _REFUSED},
        goodput=_ratio(int(met.sum()), seconds),
        met=_ratio(int(met.sum()), len(outcome)),
        output_rate=_ratio(output, seconds),
        prompt_rate=_ratio(prompt, seconds),
        ttft=_percentiles(firsts[served]),
        itl={name: outcome.itl.quantile(share) for name, share in PERCENTILES.items() if len(outcome.itl)},
        e2e=_percentiles((np.asarray(outcome.ended) - arrived)[served]),
        queue=_percentiles((np.asarray(outcome.admitted) - arrived)[served]),
        hit_rate=_ratio(int(np.asarray(outcome.cached_tokens)[served].sum()), prompt),
        pages=_ratio(sum(sample[3] for sample in outcome.samples), len(outcome.samples)),
        retractions=outcome.retractions,
        busy=_ratio(outcome.busy, outcome.served),
        seconds=seconds,
        served=outcome.served,
        cost=None if price is None else _ratio(1e6 * price * outcome.served / 3600, output),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _percentiles(seconds: npt.NDArray[np.float64]) -> dict[str, float]:
    return {name: float(np.quantile(seconds, share)) for name, share in PERCENTILES.items() if len(seconds)}


def table(rows: Sequence[tuple[str, Figures]]) -> str:
    """A table in plain text: one column for each (label, figures), units in the names of its rows. What no
    column has is left out, labels too."""
    errors = [
        (f"failed: {name}", f"failed.{name}", 1) for name in sorted({e for _, f in rows for e in f.failed})
    ]
    lines = [["", *parts] for parts in zip_longest(*(label.split(" ") for label, _ in rows), fillvalue="")]
    for title, path, factor in (*_ABOVE, *errors, *_BELOW):
        lines.append([title, *(_cell(each, path, factor) for _, each in rows)])
    lines = [line for line in lines if any(cell.strip("-") for cell in line[1:])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines)
    return "\n".join("  ".join(line) for line in aligned)


def _cell(found: Figures, path: str, factor: int) -> str:
    """A figure in four digits, or in all of a whole number."""
    name, _, part = path.partition(".")
    value: float | None = getattr(found, name).get(part) if part else getattr(found, name)
    if value is None:
        return "-"
    if isinstance(value, int) or not value:
        return f"{value * factor:.0f}"
    return f"{value * factor:.{max(0, 4 - len(str(int(value * factor))))}f}"


def as_json(rows: Sequence[tuple[str, Figures]], **facts: Any) -> str:
    """The same as JSON in seconds and shares, with ``facts`` of all columns."""
    return json.dumps(
        {**facts, "variants": [{"variant": label, **asdict(each)} for label, each in rows]}, indent=1
    )
