"""Memory: what the machine and the control groups leave to this process."""

from __future__ import annotations

from pathlib import Path

from aioinfer.execution.limits import GROUPS, MEMBERSHIP, groups_of
from aioinfer.ledger import Available

__all__ = ["memory_available", "resident"]

_MEMINFO = Path("/proc/meminfo")
_STATUS = Path("/proc/self/status")
#: files of a group by version: limits, and what is used of them
_FILES = (
    (("memory.max", "memory.high"), "memory.current"),
    (("memory.limit_in_bytes",), "memory.usage_in_bytes"),
)
#: counters of ``memory.stat`` that say how much of the usage is a copy of files, which is dropped on demand
_FILE_PAGES = (
    ("total_inactive_file", "total_active_file"),
    ("inactive_file", "active_file"),
)


def memory_available(
    root: Path = GROUPS, membership: Path = MEMBERSHIP, meminfo: Path = _MEMINFO
) -> Available | None:
    """Memory that can be used before the system ends a process for it: the least that the machine and the
    control groups of this process leave. None where the system does not say."""
    left = [_group_left(group) for group in groups_of("memory", root, membership)]
    found = [Available(size, "control group") for size in left if size is not None]
    machine = _counters(meminfo).get("MemAvailable:")
    if machine is not None:
        found.append(Available(machine << 10, "machine"))
    return min(found, key=lambda each: each.bytes, default=None)


def _group_left(group: Path) -> int | None:
    """Bytes that a group can still use; None without a limit."""
    for names, usage in _FILES:
        limits = [limit for limit in (_number(group / name) for name in names) if limit is not None]
        used = _number(group / usage)
        if not limits or used is None:
            continue
        counters = _counters(group / "memory.stat")
        pages = next((names for names in _FILE_PAGES if names[0] in counters), ())
        return max(0, min(limits) - used + sum(counters.get(name, 0) for name in pages))
    return None


def _number(file: Path) -> int | None:
    """The number in a file; None for "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _counters(file: Path) -> dict[str, int]:
    """The numbers in a file with a name and a number per line."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        return {line[0]: int(line[1]) for line in lines if len(line) > 1}
    except (OSError, ValueError):
        return {}


def resident() -> int | None:
    """Bytes of this process that are in memory, mapped files included. None where the system does not say."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS:")), None)
