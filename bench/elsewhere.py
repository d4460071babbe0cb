"""Benches of another checkout, for what a change costs: in processes of their own, in turns with this one."""

from __future__ import annotations

import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.peers.registry import ROOT

__all__ = ["bench_of", "checkout", "in_turns", "spread"]


@contextmanager
def checkout(source: str) -> Iterator[Path]:
    """The files of a directory, or of a revision of this repository in a directory for the time being.

    Raises CalledProcessError if it is neither.
    """
    if Path(source).is_dir():
        yield Path(source).resolve()
        return
    packed = subprocess.run(["git", "archive", source], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def bench_of(place: Path, arguments: list[str]) -> dict[str, Any]:
    """The JSON line of a bench of a checkout. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        line = Path(folder) / "line"
        subprocess.run(
            [sys.executable, "-m", "bench", *arguments, "--json", str(line)], cwd=place, check=True,
            env={**os.environ, "PYTHONPATH": str(place)}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        found: dict[str, Any] = json.loads(line.read_text())
        return found


def in_turns(
    places: Mapping[str, Path], rounds: int, figures: Callable[[Path], dict[str, float]]
) -> dict[str, dict[str, list[float]]]:
    """By figure and place, one value a round; who begins changes from round to round."""
    found: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds):
        for name in [*places][:: -1 if number % 2 else 1]:
            for figure, value in figures(places[name]).items():
                found.setdefault(figure, {}).setdefault(name, []).append(value)
    return found


def spread(ratios: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"ratio": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
