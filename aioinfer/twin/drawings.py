"""Drawings of outcomes as PNG files, by matplotlib: the extra ``drawings``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from aioinfer.errors import ConfigError
from aioinfer.twin.outcome import Outcome
from aioinfer.twin.report import PERCENTILES, Figures

__all__ = ["check", "draw"]

#: of distributions: the rest of the tail would fill the axis
_SHARES = np.linspace(0, 0.99, 199)
#: of one panel: (x, y) of each line by its label
_Lines: TypeAlias = dict[str, tuple[Any, Any]]


def check() -> Any:
    """matplotlib's Figure. Raises ConfigError where it is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawings need the extra: pip install 'aioinfer[drawings]'") from None
    return Figure


def draw(
    outcomes: Sequence[tuple[str, Outcome]], rows: Sequence[tuple[str, Figures]], directory: Path
) -> None:
    """Draw outcomes and their figures, by label, into a directory, which is made. Raises OSError.

    ``distributions.png`` has TTFT and ITL, ``course-1.png`` and so on the load over time, ``percentiles.png``
    the variants of a sweep.
    """
    directory.mkdir(parents=True, exist_ok=True)
    firsts: _Lines = {}
    gaps: _Lines = {}
    for number, (label, outcome) in enumerate(outcomes, 1):
        seconds = np.asarray(outcome.first) - np.asarray(outcome.arrived)
        if len(seconds := seconds[~np.isnan(seconds)]):
            firsts[label] = (1e3 * np.quantile(seconds, _SHARES), _SHARES)
            gaps[label] = ([1e3 * outcome.itl.quantile(share) for share in _SHARES], _SHARES)
        at, *columns = np.asarray(outcome.samples, np.float64).reshape(-1, 4).T
        course = zip(("waiting", "running", "share of KV pages"), columns, strict=True)
        _save(directory / f"course-{number}.png", [("seconds", y, {label: (at, each)}) for y, each in course])
    panels = [("TTFT, ms", "share of requests", firsts), ("ITL, ms", "share of tokens", gaps)]
    _save(directory / "distributions.png", panels)
    if len(rows) > 1:
        places, panels = [label.replace(" ", "\n") for label, _ in rows], []
        for field in ("ttft", "itl"):
            found = [getattr(each, field) for _, each in rows]
            lines = {p: (places, [1e3 * each.get(p, 0.0) for each in found]) for p in PERCENTILES}
            panels.append(("", f"{field.upper()}, ms", lines))
        _save(directory / "percentiles.png", panels, marker="o")


def _save(path: Path, panels: Sequence[tuple[str, str, _Lines]], marker: str = "") -> None:
    """Panels, each with the titles of its axes, one above the other."""
    figure = check()(figsize=(6, 2.4 * len(panels) + 1.6), layout="constrained")
    for axes, (x, y, lines) in zip(figure.subplots(len(panels)), panels, strict=True):
        for label, line in lines.items():
            axes.plot(*line, marker=marker, label=label)
        axes.set(xlabel=x, ylabel=y, ylim=(0, None))
        axes.grid(alpha=0.3)
        if marker:  # its places are labels
            axes.tick_params("x", rotation=60)
        if any(lines):
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
