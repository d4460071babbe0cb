"""Report of a bench: a table printed row by row, and one JSON line with versions and hardware."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from aioinfer.system.cores import processor_name

__all__ = ["Report", "environment", "percentiles"]

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
    """Hardware, versions and commit, as far as they are known."""
    versions = {}
    for package in ("aioinfer", "torch", "triton", "transformers", "aiohttp", "uvloop"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "machine": platform.machine(),
        "cpu": processor_name(),
        "cores": os.cpu_count(),
        "gpu": _gpu(),
        "python": platform.python_version(),
        "versions": versions,
        "commit": _commit(),
    }


class Report:
    """Table and JSON line of a bench; rows are printed as they come.

    A row with other columns than the one before begins a new table. With ``journal``, everything is also
    written to that file at once, so that :meth:`replay` reads what a process reported before it died.
    """

    def __init__(self, journal: Path | None = None) -> None:
        self.environment: dict[str, Any] | None = None
        self.rows: list[dict[str, Any]] = []
        self.facts: dict[str, Any] = {}
        self.notes: list[str] = []
        self.errors: list[str] = []
        self.sections: dict[str, Report] = {}
        self._journal = journal
        self._fields: dict[str, Any] = {}
        self._columns: list[str] = []

    def row(self, **cells: Any) -> None:
        """Add a line to the table. Lists and dicts are kept for the JSON line and not printed."""
        self._keep("row", cells)
        self._print({name: cell for name, cell in cells.items() if not isinstance(cell, list | dict)})

    def fact(self, name: str, value: Any) -> None:
        """Keep a figure or text of the whole bench, printed on a line of its own."""
        self._keep("fact", [name, value])
        print(f"{name}: {value:,.4g}" if isinstance(value, float) else f"{name}: {value}", flush=True)

    def note(self, text: str) -> None:
        """Print and keep what was left out, and why."""
        self._keep("note", text)
        print(f"note: {text}", flush=True)

    def error(self, text: str) -> None:
        """Print and keep a failure; the exit status is 1."""
        self._keep("error", text)
        print(f"error: {text}", flush=True)

    def add(self, **fields: Any) -> None:
        """Add fields to the JSON line that are not printed."""
        self._fields.update(fields)

    @contextmanager
    def case(self, what: str) -> Iterator[None]:
        """Report an exception of the block as an error of this case, and go on."""
        try:
            yield
        except Exception:
            self.error(f"{what}: {traceback.format_exc(limit=-4)}")

    def section(self, name: str, title: str) -> Report:
        """Begin a report within this one, with a title and a table of its own."""
        print(f"\n== {title}", flush=True)
        made = self.sections[name] = Report()
        return made

    @property
    def failed(self) -> bool:
        return bool(self.errors) or any(section.failed for section in self.sections.values())

    def as_dict(self) -> dict[str, Any]:
        """Contents of the JSON line; empty parts are left out, except for rows without sections."""
        parts: dict[str, Any] = {"facts": self.facts, "notes": self.notes, "errors": self.errors}
        found: dict[str, Any] = {"rows": self.rows} if self.rows or not self.sections else {}
        found |= {name: part for name, part in parts.items() if part}
        if self.sections:
            found["sections"] = {name: section.as_dict() for name, section in self.sections.items()}
        return {**found, **self._fields}

    def replay(self, journal: Path) -> None:
        """Take over what another process has kept (and printed)."""
        for line in journal.read_text("utf-8").splitlines() if journal.exists() else ():
            self._keep(*json.loads(line))

    def _keep(self, kind: str, value: Any) -> None:
        if kind == "row":
            self.rows.append(value)
        elif kind == "fact":
            self.facts[value[0]] = value[1]
        elif kind == "environment":
            self.environment = value
        else:
            (self.notes if kind == "note" else self.errors).append(value)
        if self._journal is not None:
            with self._journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps([kind, value]) + "\n")

    def keep_environment(self) -> None:
        """Look at hardware and versions now, in this process."""
        self._keep("environment", environment())

    def _print(self, row: dict[str, Any]) -> None:
        cells = [
            (max(len(name), _TEXT), name, value)
            if isinstance(value, str)
            else (-max(len(name), _NUMBER), name, _number(value))
            for name, value in row.items()
        ]
        if self._columns != [*row]:
            self._columns = [*row]
            print("  ".join(_padded(name, width) for width, name, _ in cells).rstrip())
        print("  ".join(_padded(text, width) for width, _, text in cells).rstrip(), flush=True)


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _commit() -> str | None:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def _padded(text: str, width: int) -> str:
    """Pad to the left, or to the right if the width is negative."""
    return text.ljust(width) if width > 0 else text.rjust(-width)


def _number(value: float | None) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)
