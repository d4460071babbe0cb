"""The results: medians over rounds with their extremes, by cell and engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.cpu.cells import Cell, ratio, spread
from bench.cpu.contest import Contestant
from bench.report import Report

__all__ = ["summary", "tell"]


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


def tell(engines: Sequence[Contestant], cells: Sequence[Cell], report: Report) -> None:
    """A row per cell and engine, what is compared as rows of their own, and samples for the JSON line."""
    found = summary(engines, cells)
    for cell in cells:
        for engine in engines:
            figures = found["medians"][engine.name][cell.name]
            rate, whole = figures.get(cell.metric, {}), figures.get("end_to_end_tokens_per_s", {})
            report.row(
                cell=cell.name,
                engine=engine.name,
                tokens_per_s=rate.get("median"),
                min=rate.get("min"),
                max=rate.get("max"),
                end_to_end=whole.get("median"),
                end_to_end_min=whole.get("min"),
                end_to_end_max=whole.get("max"),
                **_noise(engine.samples.get(cell.name, [])),
                peak_rss_mib=engine.peak.resident,
                private_mib=engine.peak.private,
            )
    if len(engines) > 1:
        for name, ratio in found["ratios"].items():
            if ratio:
                spread_of = {key: ratio[key] for key in ("median", "min", "max")}
                report.row(cell=name, engine=engines[0].name, over=ratio["best"], **spread_of)
    for engine in engines:
        _breakdowns(engine, report)
        for name, error in engine.errors.items():
            report.error(f"{engine.name}: {name} failed: {error[:300]}")
        if engine.failed:
            report.error(f"{engine.name} is out: {engine.failed[:300]}")
    report.add(**found, engines={engine.name: engine.result() for engine in engines})


def _breakdowns(engine: Contestant, report: Report) -> None:
    """Where an engine that tells spent the time of its last run of a cell."""
    for name, samples in engine.samples.items():
        if parts := samples[-1].get("breakdown"):
            total = sum(parts.values()) or 1.0
            shares = ", ".join(f"{part} {100 * value / total:.1f} %" for part, value in parts.items())
            report.note(f"{engine.name}, {name}: {shares}")


def _noise(samples: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    """Cores that others used at most, and the share of first tokens that are the first engine's."""
    firsts = [sample["agreement"]["first"] for sample in samples if "agreement" in sample]
    return {
        "others_cores": max((sample["others_cores"] for sample in samples), default=None),
        "same_first": sum(firsts) / len(firsts) if firsts else None,
    }
