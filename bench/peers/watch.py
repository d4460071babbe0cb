"""Watching processes through /proc: who belongs to an engine, their memory, and whose the CPU time was."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

__all__ = ["Memory", "Use", "Watch", "available_gib", "locked", "tree"]

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_PROC = Path("/proc")
#: seconds between looks at the memory
_INTERVAL = 0.1


def tree(root: int) -> list[int]:
    """The process, its descendants and those of its process group, ended ones excluded."""
    found = {pid: fields for pid in _pids() if (fields := _stat(pid)) and fields[0] != "Z"}
    members = {pid for pid, fields in found.items() if pid == root or int(fields[2]) == root}
    while more := {pid for pid, fields in found.items() if int(fields[1]) in members and pid not in members}:
        members |= more
    return sorted(members)


def available_gib() -> float:
    """Memory that can be had without swapping."""
    for line in (_PROC / "meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return 0.0


@contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold a file's lock, for machines that others measure on, too; without a file, nothing is held."""
    if path is None:
        yield
        return
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of some processes, summed up, in MiB: what several of them map counts several times."""

    resident: float = 0.0
    #: without mapped files, such as weights that are read where they lie
    private: float = 0.0

    def max(self, other: Memory) -> Memory:
        return Memory(max(self.resident, other.resident), max(self.private, other.private))


@dataclass(slots=True)
class Use:
    """What happened while something was watched; CPU in seconds."""

    seconds: float = 0.0
    cpu: float = 0.0
    #: of all other processes, this one included
    others_cpu: float = 0.0
    #: of this process
    own_cpu: float = 0.0
    #: that the hypervisor gave to others
    stolen: float = 0.0
    peak: Memory = field(default_factory=Memory)


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
        after = self._clocks()
        self._end.set()
        self._thread.join()
        use = self._use
        use.seconds, busy, use.cpu, use.own_cpu, use.stolen = (
            max(0.0, b - a) for a, b in zip(self._before, after, strict=True)
        )
        use.others_cpu = max(0.0, busy - use.cpu)
        use.peak = use.peak.max(_memory(tree(self._root)))

    def _look(self) -> None:
        members: list[int] = []
        for look in range(10**9):
            if look % 10 == 0:
                # Finding out who belongs to it costs more than looking at them.
                members = tree(self._root)
            self._use.peak = self._use.peak.max(_memory(members))
            if self._end.wait(_INTERVAL):
                return

    def _clocks(self) -> tuple[float, float, float, float, float]:
        """Seconds on the clock, of all CPUs, of the tree, of this process, stolen."""
        line = (_PROC / "stat").read_text().split("\n", 1)[0].split()
        user, nice, system, _, _, irq, softirq, steal = (int(value) / _TICK for value in line[1:9])
        busy = user + nice + system + irq + softirq
        mine = sum(_cpu_seconds(pid) for pid in tree(self._root))
        return time.monotonic(), busy, mine, time.process_time(), steal


def _pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """Fields from the state on (the name before it may hold anything); None if the process is gone."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _cpu_seconds(pid: int) -> float:
    """Of a process and of its children that ended."""
    fields = _stat(pid)
    return sum(map(int, fields[11:15])) / _TICK if fields else 0.0


def _memory(pids: list[int]) -> Memory:
    resident = private = 0
    for pid in pids:
        try:
            fields = (_PROC / str(pid) / "statm").read_text().split()
        except OSError:
            continue
        resident += int(fields[1])
        private += int(fields[1]) - int(fields[2])
    return Memory(resident * _PAGE / 2**20, private * _PAGE / 2**20)
