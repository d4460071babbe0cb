"""How much of the machine's CPU this process may use."""

from __future__ import annotations

from math import ceil
from pathlib import Path

__all__ = ["cpu_quota", "default_threads"]


def default_threads(usable: int, quota: float | None) -> int:
    """Threads where none are asked for: one for each usable core, as far as the quota pays.

    A container on a large machine sees all its cores, but gets the time of a few; with more threads than
    that, all wait at every barrier for one that has used up its share.
    """
    return usable if quota is None else max(1, min(usable, ceil(quota)))


def cpu_quota(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> float | None:
    """Cores whose time the control groups of this process grant it; None if there is no limit, or no Linux.

    Reads ``cpu.max`` of the group and all above it, and the two files that held it in version 1
    (https://docs.kernel.org/admin-guide/cgroup-v2.html).
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    found: list[float] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        group = top / path.lstrip("/")
        # In a container the path may be the host's: what is mounted at the top is the container's own.
        limits = [_limit(place) for place in (group, *group.parents) if place.is_relative_to(top)]
        found += [limit for limit in limits if limit is not None]
    return min(found, default=None)


def _limit(group: Path) -> float | None:
    """Cores by one group's files; None if they set no limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
            if quota != "max" and int(quota) > 0 and int(period) > 0:
                return int(quota) / int(period)
        except (OSError, ValueError):
            continue
    return None
