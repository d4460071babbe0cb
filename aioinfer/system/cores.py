"""Cores: how much of the machine's CPU this process may use, control groups included."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from math import ceil
from pathlib import Path

from aioinfer.errors import ConfigError
from aioinfer.system.groups import GROUPS, MEMBERSHIP, groups_of

__all__ = ["check_threads", "cpu_quota", "default_threads", "processor_name", "usable_cores"]

#: bounds of the threads that can be asked for: per core, and in any case
_THREADS_PER_CORE = 4
_LEAST_BOUND = 16


def default_threads(usable: int, quota: float | None) -> int:
    """Threads where none are asked for: one for each usable core, as far as the quota pays.

    A container on a large machine sees all its cores, but gets the time of a few; with more threads than
    that, all wait at every barrier for one that has used up its share.
    """
    return usable if quota is None else max(1, min(usable, ceil(quota)))


def processor_name() -> str:
    """As the system calls it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(threads: int, cores: int) -> None:
    """Raise ConfigError for more threads than can be of use: at each of a step's hundreds of barriers they
    would wait for each other."""
    most = max(_LEAST_BOUND, _THREADS_PER_CORE * cores)
    if threads > most:
        raise ConfigError(f"threads: {threads} are too many for {cores} cores, at most {most} are possible")


def cpu_quota(root: Path = GROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Cores whose time the control groups of this process grant it; None if there is no limit, or no Linux.

    Reads ``cpu.max`` of the group and all above it, and the two files that held it in version 1.
    """
    limits = [_quota(group) for group in groups_of("cpu", root, membership)]
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
