"""Limits: how much of the machine's CPU and memory this process may use, control groups included."""

from __future__ import annotations

import ctypes
from math import ceil
from pathlib import Path

from aioinfer.errors import ConfigError
from aioinfer.ledger import Available

__all__ = ["check_threads", "cpu_quota", "default_threads", "give_back", "memory_available"]

_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
#: bounds of the threads that can be asked for: per core, and in any case
_THREADS_PER_CORE = 4
_LEAST_BOUND = 16
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


def _groups(controller: str, root: Path, membership: Path) -> list[Path]:
    """The control groups of this process that may limit ``controller`` ("cpu", "memory"), and all above them,
    of both versions (https://docs.kernel.org/admin-guide/cgroup-v2.html). None without Linux."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found: dict[Path, None] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controller if controllers else root
        group = top / path.lstrip("/")
        # In a container the path may be the host's: what is mounted at the top is the container's own.
        found |= dict.fromkeys(place for place in (group, *group.parents) if place.is_relative_to(top))
    return list(found)


def default_threads(usable: int, quota: float | None) -> int:
    """Threads where none are asked for: one for each usable core, as far as the quota pays.

    A container on a large machine sees all its cores, but gets the time of a few; with more threads than
    that, all wait at every barrier for one that has used up its share.
    """
    return usable if quota is None else max(1, min(usable, ceil(quota)))


def check_threads(threads: int, cores: int) -> None:
    """Raise ConfigError for more threads than can be of use: at each of a step's hundreds of barriers they
    would wait for each other."""
    most = max(_LEAST_BOUND, _THREADS_PER_CORE * cores)
    if threads > most:
        raise ConfigError(f"threads: {threads} are too many for {cores} cores, at most {most} are possible")


def cpu_quota(root: Path = _GROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Cores whose time the control groups of this process grant it; None if there is no limit, or no Linux.

    Reads ``cpu.max`` of the group and all above it, and the two files that held it in version 1.
    """
    limits = [_quota(group) for group in _groups("cpu", root, membership)]
    return min((limit for limit in limits if limit is not None), default=None)


def _quota(group: Path) -> float | None:
    """Cores by one group's files; None if they set no limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
            if quota != "max" and int(quota) > 0 and int(period) > 0:
                return int(quota) / int(period)
        except (OSError, ValueError):
            continue
    return None


def memory_available(
    root: Path = _GROUPS, membership: Path = _MEMBERSHIP, meminfo: Path = _MEMINFO
) -> Available | None:
    """Memory that can be used before the system ends a process for it: the least that the machine and the
    control groups of this process leave. None where the system does not say."""
    left = [_group_left(group) for group in _groups("memory", root, membership)]
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


def give_back() -> None:
    """Return memory that was freed to the system, where the C library keeps it for later: building a model
    leaves it a hundred megabytes and more."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
