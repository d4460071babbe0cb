"""Reports: a table that is printed row by row, and one JSON line with versions and hardware."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["LiveTable", "Report", "environment", "percentiles", "write_line"]

#: least widths of columns
_TEXT, _NUMBER = 14, 8


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


class Report:
    """What a bench found: one table whose rows are printed as they come, and the fields of its JSON line.

    A row with other columns than the last one begins a new header. ``environment`` is set by a bench whose
    process must not look at the device itself.
    """

    def __init__(self) -> None:
        self.environment: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []
        self.errors: list[str] = []
        self.sections: dict[str, Report] = {}
        self._fields: dict[str, Any] = {}
        self._table = LiveTable()

    def row(self, **cells: Any) -> None:
        """A line of the table. Lists and dicts are kept for the JSON line and not printed."""
        self.rows.append(cells)
        self._table.print({name: cell for name, cell in cells.items() if not isinstance(cell, list | dict)})

    def fact(self, name: str, value: Any) -> None:
        """One figure or text that holds for the whole bench, printed on a line of its own."""
        self.facts[name] = value
        print(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}", flush=True)

    def note(self, text: str) -> None:
        """Printed and kept: what was left out, and why."""
        self.notes.append(text)
        print(f"note: {text}", flush=True)

    def error(self, text: str) -> None:
        """Printed and kept; the exit status is 1."""
        self.errors.append(text)
        print(f"error: {text}", flush=True)

    def add(self, **fields: Any) -> None:
        """Fields of the JSON line that are not printed."""
        self._fields.update(fields)

    def section(self, name: str, title: str) -> Report:
        """A report within this one, with a title and a table of its own."""
        print(f"\n== {title}", flush=True)
        made = self.sections[name] = Report()
        return made

    @property
    def failed(self) -> bool:
        return bool(self.errors) or any(section.failed for section in self.sections.values())

    def as_dict(self) -> dict[str, Any]:
        """What the JSON line has of it; nothing for what is empty, except for rows without sections."""
        parts: dict[str, Any] = {"facts": self.facts, "notes": self.notes, "errors": self.errors}
        found: dict[str, Any] = {"rows": self.rows} if self.rows or not self.sections else {}
        found |= {name: part for name, part in parts.items() if part}
        if self.sections:
            found["sections"] = {name: section.as_dict() for name, section in self.sections.items()}
        return {**found, **self._fields}


class LiveTable:
    """Prints rows as they come, under their names; a row with other names begins another table."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def print(self, row: Mapping[str, Any]) -> None:
        cells = [
            (max(len(name), _TEXT), name, str(value))
            if isinstance(value, str)
            else (-max(len(name), _NUMBER), name, _number(value))
            for name, value in row.items()
        ]
        if self._names != [*row]:
            self._names = [*row]
            print("  ".join(_padded(name, width) for width, name, _ in cells).rstrip())
        print("  ".join(_padded(text, width) for width, _, text in cells).rstrip(), flush=True)


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


def _padded(text: str, width: int) -> str:
    """To the left, or to the right if the width is negative."""
    return text.ljust(width) if width > 0 else text.rjust(-width)


def _number(value: float | None) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)
