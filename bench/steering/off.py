"""``off``: what requests without processors cost beside a checkout that does not have them."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

from aioinfer.checkpoint.files import open_checkpoint
from aioinfer.checkpoint.locate import locate
from bench.cpu.contest import Cell, Contest, Contestant, Limits
from bench.elsewhere import bench_of, checkout, in_turns, spread
from bench.peers.registry import ROOT
from bench.report import Report
from bench.steering.setting import DEMO, path_of, tell, threads

__all__ = ["off"]

_ROWS = 32
_RUNNING = (32, 256)


def off(options: argparse.Namespace, report: Report) -> None:
    """Rows of the median, least and most ratio to the other checkout: of the scheduler's microseconds per
    row, and of tokens per second of 32 rows; then what is asked of them."""
    if options.against is None:
        report.note("off needs --against DIRECTORY or REVISION")
        return
    with checkout(options.against) as before:
        places = {"here": ROOT, "before": before}
        medians = _scheduler(options, places, report)
        for model in options.models:
            medians |= _tokens(model, options, places, report)
    for figure, ratio in medians.items():
        if figure.startswith("tokens"):
            tell(report, f"{figure}, of before", ratio, least=0.99)
        else:
            tell(report, f"{figure}, of before", ratio, most=1.01)


def _scheduler(options: argparse.Namespace, places: dict[str, Path], report: Report) -> dict[str, float]:
    running = [*map(str, _RUNNING)]
    steps, rounds = ("5", "1") if options.quick else ("200", "15")

    def figures(place: Path) -> dict[str, float]:
        command = ["scheduler", "--running", *running, "--waiting", "0", "--cached-pages", "0"]
        rows = bench_of(place, [*command, "--steps", steps, "--rounds", rounds])["rows"]
        return {f"us per row at {row['running']}": row["us_per_row"] for row in rows}

    found = in_turns(places, options.rounds, figures)
    return {
        figure: _row(report, figure, values["here"], values["before"]) for figure, values in found.items()
    }


def _tokens(
    model: str, options: argparse.Namespace, places: dict[str, Path], report: Report
) -> dict[str, float]:
    """Both engines are loaded; one is stopped while the other computes."""
    demo = model == DEMO
    output = 8 if options.quick else 256 if demo else 32
    cell = Cell(_ROWS, 16, output)
    path = path_of(model, options)
    settings: dict[str, Any] = {
        "model": path,
        "threads": threads(model, options),
        "kv_gib": 0.05 if options.quick else 1.0,
        "max_len": 512,
        "max_batch": _ROWS,
        "options": {"speculation": "off"},
    }
    command = [sys.executable, "-m", "bench.peers.adapters.aioinfer_engine"]
    engines = [
        Contestant(name, command, place, options.place / "logs" / f"steering-{name}.log", settings)
        for name, place in places.items()
    ]
    vocab = open_checkpoint(locate(path)).config()["vocab_size"]
    rounds = options.rounds if demo else -(-options.rounds // 2)
    Contest(engines, [cell], vocab, Limits(attempts=2)).run(rounds)
    for engine in engines:
        if engine.failed or engine.errors:
            raise RuntimeError(f"{engine.name}: {engine.failed or engine.errors}")
    here, before = (engine.by_round(cell, "end_to_end_tokens_per_s") for engine in engines)
    shared = sorted(here.keys() & before.keys())
    figure = f"tokens/s, {model}"
    return {figure: _row(report, figure, [here[each] for each in shared], [before[each] for each in shared])}


def _row(report: Report, figure: str, here: list[float], before: list[float]) -> float:
    ratios = [one / other for one, other in zip(here, before, strict=True)]
    found = spread(ratios)
    report.row(
        figure=figure,
        pairs=len(ratios),
        here=statistics.median(here),
        before=statistics.median(before),
        **found,
        ratios=ratios,
    )
    return found["ratio"]
