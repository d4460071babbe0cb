"""Memory: what the machine has, what it and the control groups leave to this process, and what this has."""

from __future__ import annotations

import ctypes
import mmap
import os
from dataclasses import dataclass
from pathlib import Path

from aioinfer.system import mac
from aioinfer.system.groups import GROUPS, MEMBERSHIP, groups_of
from aioinfer.system.support import c_function, is_mac

__all__ = [
    "Available",
    "give_back",
    "machine_memory",
    "memory_available",
    "process_memory",
    "resident",
    "zeros",
]

_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
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
#: numbers of which the lowest bit is set: a page is in memory, whatever else is said of it
_RESIDENT = bytes(range(1, 256, 2))


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes, and where that limit comes from."""

    bytes: int
    source: str


def machine_memory() -> int | None:
    """Bytes of the machine's memory. None where the system does not say."""
    if is_mac():
        return mac.memory()
    if not hasattr(os, "sysconf"):  # Windows
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_available(
    root: Path = GROUPS, membership: Path = MEMBERSHIP, meminfo: Path = _MEMINFO
) -> Available | None:
    """Memory that can be used before the system ends a process for it: the least that the machine and the
    control groups of this process leave. None where the system does not say."""
    left = [_group_left(group) for group in groups_of("memory", root, membership)]
    found = [Available(size, "control group") for size in left if size is not None]
    machine = mac.memory_available() if is_mac() else _counters(meminfo).get("MemAvailable:")
    if machine is not None:
        found.append(Available(machine, "machine"))
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
    """The numbers in a file with a name and a number per line, in bytes where their unit is kB."""
    try:
        lines = [line.split() for line in file.read_text().splitlines()]
        return {
            line[0]: int(line[1]) << 10 * (line[2:] == ["kB"])
            for line in lines
            if line[1:] and line[1].isdigit()
        }
    except (OSError, ValueError):
        return {}


def process_memory() -> int | None:
    """Bytes of this process that are in memory, mapped files included. None where the system does not say."""
    return mac.resident() if is_mac() else _counters(_STATUS).get("VmRSS:")


def give_back() -> None:
    """Return memory that was freed to the system, where the C library keeps it for later: building a model
    leaves it a hundred megabytes and more."""
    if is_mac():
        mac.give_back()
    elif (trim := c_function("malloc_trim")) is not None:
        trim(0)


def zeros(size: int) -> mmap.mmap:
    """Zeros of which each page is taken when it is first written, and which go back to the system at their
    end. The C library may use memory again that was freed, and write all of it. Raises MemoryError."""
    try:
        return mmap.mmap(-1, max(1, size), **_PRIVATE)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error}") from error


def resident(address: int, size: int) -> int:
    """Bytes of a mapping of ``size`` bytes that are in memory, in whole pages; 0 where the system does not
    say."""
    if (mincore := c_function("mincore")) is None:
        return 0
    page = os.sysconf("SC_PAGE_SIZE")
    begin, end = address - address % page, address + size
    count, found = 0, (ctypes.c_ubyte * (1 << 16))()
    for start in range(begin, end, page << 16):
        pages = min(1 << 16, -(-(end - start) // page))
        if mincore(ctypes.c_void_p(start), ctypes.c_size_t(pages * page), found):
            return 0
        count += pages - len(bytes(found[:pages]).translate(None, _RESIDENT))
    return min(size, count * page)
