"""``off``: what the engine costs without sessions and tiers, beside a checkout that does not have them."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench.peers.registry import ROOT
from bench.report import Report

__all__ = ["off"]

_RUNNING = (1, 64, 256)


def off(options: argparse.Namespace, report: Report) -> None:
    """A row for each figure: medians here and in the base, and the median, least and most ratio of neighbours
    in time; of the scheduler microseconds per row, of a load tokens per second."""
    places = {"here": ROOT} | ({"base": options.base.resolve()} if options.base else {})
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        for name in [*places][:: -1 if number % 2 else 1]:
            for figure, value in _figures(options, places[name]).items():
                found.setdefault(figure, {}).setdefault(name, []).append(value)
    for figure, values in found.items():
        row = {name: statistics.median(each) for name, each in values.items()}
        if "base" in values:
            ratios = [here / base for here, base in zip(values["here"], values["base"], strict=True)]
            row |= {
                "ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "best_of_best": _best(figure, values["here"]) / _best(figure, values["base"]),
            }
        report.row(figure=figure, rounds=options.rounds, **row)


def _best(figure: str, values: list[float]) -> float:
    return max(values) if figure == "tokens/s" else min(values)


def _figures(options: argparse.Namespace, place: Path) -> dict[str, float]:
    steps = 5 if options.quick else 200
    scheduler = f"scheduler --running {' '.join(map(str, _RUNNING))} --waiting 0 --cached-pages 0"
    lines = _bench(place, [*scheduler.split(), "--steps", str(steps), "--rounds", "3"])["rows"]
    found = {f"us/row at {line['running']}": line["us_per_row"] for line in lines}
    load = f"serving --threads {options.threads} --concurrency 16 --requests {options.requests}"
    settings = ["--speculation", "off", "--model", options.model, "--quantization", options.quantization]
    if options.cache_weights:
        settings.append("--cache-weights")
    facts = _bench(place, [*load.split(), *settings])["facts"]
    return {**found, "tokens/s": facts["output_tokens_per_s"]}


def _bench(place: Path, arguments: list[str]) -> dict[str, Any]:
    """The JSON line of a bench in a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        line = Path(folder) / "line"
        subprocess.run(
            [sys.executable, "-m", "bench", *arguments, "--json", str(line)], cwd=place, check=True,
            env={**os.environ, "PYTHONPATH": str(place)}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(line.read_text())
        return found
