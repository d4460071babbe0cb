"""Drawings of outcomes as PNG files, by matplotlib: the extra ``drawings``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from aioinfer.errors import ConfigError
from aioinfer.twin.outcome import Outcome
from aioinfer.twin.report import PERCENTILES, Figures
from aioinfer.twin.slo import first_tokens

__all__ = ["check", "draw"]


def check() -> None:
    """Raise ConfigError unless matplotlib is installed."""
    _figure(1, 1)


def draw(
    outcomes: Sequence[tuple[str, Outcome]], rows: Sequence[tuple[str, Figures]], directory: Path
) -> None:
    """Draw outcomes and their figures, by label, into a directory, which is made. Raises OSError.

    ``distributions.png`` has TTFT and ITL, ``course-1.png`` and so on the load over time, ``percentiles.png``
    the variants of a sweep.
    """
    directory.mkdir(parents=True, exist_ok=True)
    drawn = {"distributions": _distributions(outcomes)}
    drawn |= {f"course-{number}": _course(*each) for number, each in enumerate(outcomes, 1)}
    if len(rows) > 1:
        drawn["percentiles"] = _percentiles(rows)
    for name, figure in drawn.items():
        figure.savefig(directory / f"{name}.png", dpi=120)


def _figure(rows: int, columns: int) -> tuple[Any, Any]:
    """A figure of its own, without pyplot's state, and its axes, [rows * columns]."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawings need the extra: pip install 'aioinfer[drawings]'") from None
    figure = Figure(figsize=(5 * columns + 1, 2.4 * rows + 1.6), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False).ravel()


def _distributions(outcomes: Sequence[tuple[str, Outcome]]) -> Any:
    figure, plots = _figure(1, 2)
    shares = np.linspace(0, 1, 201)
    for label, outcome in outcomes:
        firsts = first_tokens(outcome)
        gaps = np.asarray([outcome.itl.quantile(share) for share in shares])
        for axes, seconds in zip(plots, (firsts[~np.isnan(firsts)], gaps), strict=True):
            if len(seconds):
                axes.plot(1e3 * np.quantile(seconds, shares), shares, label=label)
    for axes, title, what in zip(plots, ("TTFT", "ITL"), ("requests", "tokens"), strict=True):
        longest = [line.get_xdata()[198] for line in axes.get_lines()]  # p99: the tail would fill the axis
        axes.set(xlabel=f"{title}, ms", ylabel=f"share of {what}")
        axes.set(xlim=(0, 1.1 * max(longest, default=0) or 1), ylim=(0, 1))
        axes.grid(alpha=0.3)
    if any(label for label, _ in outcomes):
        plots[0].legend(fontsize="small")
    return figure


def _course(label: str, outcome: Outcome) -> Any:
    figure, plots = _figure(3, 1)
    seconds, *columns = np.asarray(outcome.samples, np.float64).reshape(-1, 4).T
    columns[2] *= 100
    for axes, title, values in zip(plots, ("waiting", "running", "KV pages, %"), columns, strict=True):
        axes.step(seconds, values, where="post")
        axes.set(ylabel=title, ylim=(0, 1.1 * max(values, default=0) or 1))
        axes.grid(alpha=0.3)
    plots[-1].set_xlabel("seconds")
    figure.suptitle(label)
    return figure


def _percentiles(rows: Sequence[tuple[str, Figures]]) -> Any:
    """Over the values where a single number is varied, else one after the other."""
    figure, plots = _figure(1, 2)
    names, texts = zip(*(label.rpartition("=")[::2] for label, _ in rows), strict=True)
    try:
        (name,), places = set(names), [float(text) for text in texts]
    except ValueError:
        name, places, texts = "", [*range(len(rows))], tuple(label.replace(" ", "\n") for label, _ in rows)
    for axes, field, title in zip(plots, ("ttft", "itl"), ("TTFT, ms", "ITL, ms"), strict=True):
        for share in PERCENTILES:
            found = [1e3 * getattr(each, field).get(share, 0) for _, each in rows]
            axes.plot(places, found, marker="o", label=share)
        axes.set(xlabel=name, ylabel=title, ylim=(0, 1.1 * max(found) or 1))  # of p99
        axes.set_xticks(places, texts, rotation=0 if name else 60)
        axes.grid(alpha=0.3)
    plots[0].legend(fontsize="small")
    return figure
