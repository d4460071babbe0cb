"""``off``: what the engine costs without sessions and tiers, beside a checkout that does not have them."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from bench.elsewhere import bench_of, in_turns, spread
from bench.peers.registry import ROOT
from bench.report import Report

__all__ = ["off"]

_RUNNING = (1, 64, 256)


def off(options: argparse.Namespace, report: Report) -> None:
    """A row for each figure: medians here and in the base, and the median, least and most ratio of neighbours
    in time; of the scheduler microseconds per row, of a load tokens per second."""
    places = {"here": ROOT} | ({"base": options.base.resolve()} if options.base else {})
    found = in_turns(places, options.rounds, lambda place: _figures(options, place))
    for figure, values in found.items():
        row = {name: statistics.median(each) for name, each in values.items()}
        if "base" in values:
            row |= spread([here / base for here, base in zip(values["here"], values["base"], strict=True)])
            row["best_of_best"] = _best(figure, values["here"]) / _best(figure, values["base"])
        report.row(figure=figure, rounds=options.rounds, **row)


def _best(figure: str, values: list[float]) -> float:
    return max(values) if figure == "tokens/s" else min(values)


def _figures(options: argparse.Namespace, place: Path) -> dict[str, float]:
    steps = 5 if options.quick else 200
    scheduler = f"scheduler --running {' '.join(map(str, _RUNNING))} --waiting 0 --cached-pages 0"
    lines = bench_of(place, [*scheduler.split(), "--steps", str(steps), "--rounds", "3"])["rows"]
    found = {f"us/row at {line['running']}": line["us_per_row"] for line in lines}
    load = f"serving --threads {options.threads} --concurrency 16 --requests {options.requests}"
    settings = ["--speculation", "off", "--model", options.model, "--quantization", options.quantization]
    if options.cache_weights:
        settings.append("--cache-weights")
    facts = bench_of(place, [*load.split(), *settings])["facts"]
    return {**found, "tokens/s": facts["output_tokens_per_s"]}
