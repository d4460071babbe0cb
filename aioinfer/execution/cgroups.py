"""Control groups: limits that hold for this process and that the machine's own numbers do not show."""

from __future__ import annotations

from pathlib import Path

__all__ = ["MEMBERSHIP", "ROOT", "groups"]

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> list[Path]:
    """The groups of this process that may limit what ``controller`` ("cpu", "memory") counts, and all above
    them, of both versions (https://docs.kernel.org/admin-guide/cgroup-v2.html). None without Linux."""
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
