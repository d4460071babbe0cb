"""Groups: the control groups of Linux that bound this process."""

from __future__ import annotations

from pathlib import Path

__all__ = ["GROUPS", "MEMBERSHIP", "groups_of"]

GROUPS = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups_of(controller: str, root: Path, membership: Path) -> list[Path]:
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
