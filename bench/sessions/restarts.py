"""``restart``: a prefix after a restart, computed again and read from the directory of the prefix cache."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from bench.report import Report
from bench.sessions.disk import drop, size_of
from bench.sessions.setting import child, median, settings, tokens

__all__ = ["restart"]

_OUTPUT = 8


def restart(options: argparse.Namespace, report: Report) -> None:
    """A row with medians: TTFT without the directory's files, with them, and with them out of the system's
    memory; each in a process of its own."""
    rounds = []
    for number in range(options.rounds):
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            rounds.append(_round(options, report, Path(folder), number))
    report.row(prefix=options.prefix, rounds=options.rounds, **median(rounds))


def _round(options: argparse.Namespace, report: Report, folder: Path, number: int) -> dict[str, float]:
    prompt = tokens(options.prefix + 1, number)
    given = settings(options, 2 * options.prefix + 512, prefix_cache_dir=str(folder))

    def ask(store: bool = False) -> dict[str, Any]:
        return child("ask", settings=given, prompt=prompt, output=_OUTPUT, store=store)

    cold = ask(store=True)
    drop(folder)
    dropped, warm = ask(), ask()
    for way, found in (("warm", warm), ("dropped", dropped)):
        if found["cached"] + 16 < options.prefix:
            report.error(f"{way}: {found['cached']} of {options.prefix} tokens were read")
        if found["ids"] != cold["ids"]:
            say = report.error if options.deterministic else report.note
            say(f"{way}: other ids than those that were computed")
    return {
        "cold_ms": 1e3 * cold["ttft"],
        "warm_ms": 1e3 * warm["ttft"],
        "dropped_ms": 1e3 * dropped["ttft"],
        "of_cold": warm["ttft"] / cold["ttft"],
        "dropped_of_cold": dropped["ttft"] / cold["ttft"],
        "mib": size_of(folder) / 2**20,
        "read_tokens": warm["cached"],
        "same_ids": (warm["ids"] == cold["ids"]) + (dropped["ids"] == cold["ids"]),
    }
