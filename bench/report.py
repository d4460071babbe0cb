"""Reports: percentiles as a table, and everything as one JSON line with versions and hardware."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["environment", "percentiles", "print_table", "write_line"]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p95, p99 and maximum; linear between neighbours. Empty for no values."""
    if not values:
        return {}
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (place - low)

    mean = sum(ordered) / len(ordered)
    return {"mean": mean, "p50": at(0.5), "p95": at(0.95), "p99": at(0.99), "max": ordered[-1]}


def environment() -> dict[str, Any]:
    """Hardware, versions and commit, as far as they can be found out."""
    versions = {}
    for package in ("aioinfer", "torch", "triton", "transformers", "aiohttp", "uvloop"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "machine": platform.machine(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "gpu": _gpu(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }


def print_table(title: str, rows: dict[str, dict[str, float]], unit: str) -> None:
    """One line per metric."""
    print(f"{title:14s}" + "".join(f"{name:>10s}" for name in ("mean", "p50", "p95", "p99", "max")))
    for name, values in rows.items():
        cells = "".join(f"{values[key]:10.2f}" for key in ("mean", "p50", "p95", "p99", "max") if values)
        print(f"{name:14s}{cells or '         -'}  {unit if values else ''}")


def write_line(result: dict[str, Any], path: Path | None) -> None:
    """Print the JSON line, and append it to a file if one is given."""
    line = json.dumps(result, separators=(",", ":"))
    print(line)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _commit() -> str | None:
    here = Path(__file__).parent
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()
