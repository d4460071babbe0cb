"""The results as tables: engines in lines, cells in columns, medians over rounds with their extremes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cpu.cells import Cell, ratio, spread
from bench.cpu.contest import Contestant

__all__ = ["print_results", "settings_of", "summary"]


def by_round(engine: Contestant, cell: Cell, metric: str) -> dict[int, float]:
    return {
        sample["round"]: sample[metric] for sample in engine.samples.get(cell.name, []) if metric in sample
    }


def summary(engines: Sequence[Contestant], cells: Sequence[Cell]) -> dict[str, Any]:
    """Medians of every figure, and the first engine over the best of the others, cell by cell."""
    metrics = ("decode_tokens_per_s", "end_to_end_tokens_per_s", "prefill_tokens_per_s", "others_cores")
    medians = {
        engine.name: {
            cell.name: {
                metric: spread(values)
                for metric in metrics
                if (values := list(by_round(engine, cell, metric).values()))
            }
            for cell in cells
        }
        for engine in engines
    }
    ours, *theirs = engines
    compared = {cell.name: (cell, cell.metric) for cell in cells}
    compared |= {
        f"{cell.name} end to end": (cell, "end_to_end_tokens_per_s") for cell in cells if cell.output > 1
    }
    ratios = {
        name: ratio(
            by_round(ours, cell, metric), {peer.name: by_round(peer, cell, metric) for peer in theirs}
        )
        for name, (cell, metric) in compared.items()
    }
    return {"medians": medians, "ratios": ratios}


def print_results(engines: Sequence[Contestant], cells: Sequence[Cell], found: dict[str, Any]) -> None:
    names = [cell.name for cell in cells]
    print("\ntokens/s: decode, or prefill where there is one new token")
    _line("", [*names, "peak RSS MiB", "private MiB"])
    for engine in engines:
        cells_of = found["medians"][engine.name]
        rates = [_cell(cells_of[cell.name].get(cell.metric)) for cell in cells]
        _line(engine.name, [*rates, f"{engine.peak.resident:,.0f}", f"{engine.peak.private:,.0f}"])
    decodes = [cell for cell in cells if cell.output > 1]
    if decodes:
        print("\nend to end tokens/s")
        _line("", [cell.name for cell in decodes])
        for engine in engines:
            medians = found["medians"][engine.name]
            _line(engine.name, [_cell(medians[cell.name].get("end_to_end_tokens_per_s")) for cell in decodes])
    print("\ncores that other processes used, and first tokens that are the first engine's")
    _line("", names)
    for engine in engines:
        _line(engine.name, [_noise(engine.samples.get(name, [])) for name in names])
    if len(engines) > 1:
        print(f"\n{engines[0].name} over the best other, the median of the rounds' ratios")
        for name, value in found["ratios"].items():
            print(f"  {name:18s} " + (f"x {_cell(value)} of {value['best']}" if value else "-"))
    for engine in engines:
        _breakdowns(engine)
        for name, error in engine.errors.items():
            print(f"{engine.name}: {name} failed: {error[:300]}")
        if engine.failed:
            print(f"{engine.name}: out: {engine.failed[:300]}")


def _breakdowns(engine: Contestant) -> None:
    """Where an engine that tells spent the time of its last run of a cell."""
    for name, samples in engine.samples.items():
        if parts := samples[-1].get("breakdown"):
            total = sum(parts.values()) or 1.0
            shares = ", ".join(f"{part} {100 * value / total:.1f} %" for part, value in parts.items())
            print(f"{engine.name}, {name}: {shares}")


def _cell(values: dict[str, Any] | None) -> str:
    if not values:
        return "-"
    digits = 2 if values["median"] < 10 else 1
    median, low, high = (f"{values[key]:.{digits}f}" for key in ("median", "min", "max"))
    return median if low == high else f"{median} ({low} to {high})"


def _noise(samples: Sequence[dict[str, Any]]) -> str:
    if not samples:
        return "-"
    cores = max(sample["others_cores"] for sample in samples)
    firsts = [sample["agreement"]["first"] for sample in samples if "agreement" in sample]
    return f"{cores:.2f}, " + (f"{100 * sum(firsts) / len(firsts):.0f} %" if firsts else "-")


def _line(name: str, texts: Sequence[str]) -> None:
    print(f"{name:12s}" + "".join(f"  {text:>22s}" for text in texts))


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The command line for the report, without where things lie on this machine."""
    hidden = ("json", "lock", "place", "own")
    settings = {key: value for key, value in vars(options).items() if key not in hidden}
    return {**settings, "model": Path(options.model).name}
