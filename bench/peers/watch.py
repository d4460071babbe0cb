"""Watching processes through /proc: members of an engine, their memory, and the CPU time of all others."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

__all__ = ["Use", "Watch", "tree"]

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")
#: seconds between looks at the memory
_INTERVAL = 0.1


def tree(root: int) -> list[int]:
    """The process, its descendants and those of its process group, ended ones excluded."""
    pids = [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]
    found = {pid: fields for pid in pids if (fields := _stat(pid)) and fields[0] != "Z"}
    members = {pid for pid, fields in found.items() if pid == root or int(fields[2]) == root}
    while more := {pid for pid, fields in found.items() if int(fields[1]) in members and pid not in members}:
        members |= more
    return sorted(members)


@dataclass(slots=True)
class Use:
    """Use of the machine while something was watched; CPU in cores."""

    #: of all other processes, this one included, and of the hypervisor's other guests
    others_cores: float = 0.0
    #: resident memory of the watched processes in MiB; what several of them map counts several times
    peak_mib: float = 0.0


class Watch:
    """``with Watch(pid) as use: ...`` fills ``use`` when it ends: a thread looks at the memory meanwhile."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._use = Use()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)

    def __enter__(self) -> Use:
        self._before = self._clocks()
        self._thread.start()
        return self._use

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds, busy, mine = (b - a for a, b in zip(self._before, self._clocks(), strict=True))
        self._end.set()
        self._thread.join()
        self._use.others_cores = max(0.0, busy - mine) / max(seconds, 1e-9)
        self._use.peak_mib = max(self._use.peak_mib, _memory(tree(self._root)))

    def _look(self) -> None:
        members: list[int] = []
        look = 0
        while True:
            if look % 10 == 0:
                # Finding the members costs more than looking at them.
                members = tree(self._root)
            look += 1
            self._use.peak_mib = max(self._use.peak_mib, _memory(members))
            if self._end.wait(_INTERVAL):
                return

    def _clocks(self) -> tuple[float, float, float]:
        """Seconds on the clock, of all CPUs (those that the hypervisor gave to others included), of the
        tree."""
        line = (_PROC / "stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, irq, softirq, steal = (int(value) / _TICK for value in line[1:9])
        mine = sum(_cpu_seconds(pid) for pid in tree(self._root))
        return time.monotonic(), user + nice + system + irq + softirq + steal, mine


def _stat(pid: int) -> list[str] | None:
    """Fields from the state on (the name before it may hold anything); None if the process is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children that ended."""
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) / _TICK if fields else 0.0


def _memory(pids: list[int]) -> float:
    """MiB that are resident."""
    resident = 0
    for pid in pids:
        try:
            resident += int((_PROC / str(pid) / "statm").read_text().split()[1])
        except OSError:
            continue
    return resident * _PAGE / 2**20
