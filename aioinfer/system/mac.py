"""Mac: what macOS says by sysctl(3), libproc and its threads, through the C library; no program is started.

The names are those of ``sysctl -a`` and of Apple's "Determining instruction set characteristics".
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

from aioinfer.system.support import c_function

__all__ = ["give_back", "instruction_sets", "lower_quality", "memory", "memory_available", "resident"]

#: bytes of the longest answer that is read
_MOST = 4096
#: pages that a process can get without others losing what they have written: free, of files, and purgeable
_PAGES = ("vm.page_free_count", "vm.page_pageable_external_count", "vm.page_purgeable_count")
#: instruction sets of Arm as ``/proc/cpuinfo`` of Linux calls them, by their key under "hw.optional"
_ARM = {
    "AdvSIMD": "asimd",
    "arm.FEAT_FP16": "asimdhp",
    "arm.FEAT_LSE": "atomics",
    "arm.FEAT_DotProd": "asimddp",
    "arm.FEAT_BF16": "bf16",
    "arm.FEAT_I8MM": "i8mm",
    "arm.FEAT_SME": "sme",
    "arm.FEAT_SME2": "sme2",
}
#: libproc's proc_taskinfo: its number, its size, and its first two fields: virtual and resident bytes
_TASK_INFO, _TASK_INFO_SIZE, _TASK_SIZES = 4, 96, struct.Struct("=QQ")
#: of pthread/qos.h: work that takes a while and that nobody waits for at a screen
_QOS_UTILITY = 0x11


def _sysctl(name: str) -> bytes | None:
    """The value of this name; None where the system has none."""
    ask = c_function("sysctlbyname")
    size, found = ctypes.c_size_t(_MOST), ctypes.create_string_buffer(_MOST)
    if ask is None or ask(name.encode(), found, ctypes.byref(size), None, ctypes.c_size_t(0)):
        return None
    return found.raw[: size.value]


def _number(name: str) -> int | None:
    found = _sysctl(name)
    return int.from_bytes(found, sys.byteorder) if found else None


def memory() -> int | None:
    """Bytes of the machine's memory."""
    return _number("hw.memsize")


def memory_available() -> int | None:
    """Bytes that this process can use before the system begins to compress or to swap."""
    size, counts = _number("vm.pagesize"), [_number(name) for name in _PAGES]
    known = [each for each in counts if each is not None]
    return None if size is None or len(known) < len(counts) else size * sum(known)


def resident() -> int | None:
    """Bytes of this process that are in memory."""
    ask, found = c_function("proc_pidinfo"), ctypes.create_string_buffer(_TASK_INFO_SIZE)
    if ask is None:
        return None
    size = ask(os.getpid(), _TASK_INFO, ctypes.c_uint64(0), found, _TASK_INFO_SIZE)
    return int(_TASK_SIZES.unpack_from(found)[1]) if size == _TASK_INFO_SIZE else None


def give_back() -> None:
    """Return memory that was freed to the system, as much as there is, of all zones."""
    relieve = c_function("malloc_zone_pressure_relief")
    if relieve is not None:
        relieve(None, ctypes.c_size_t(0))


def instruction_sets() -> str:
    """The processor's instruction sets, separated by spaces, as Linux calls them in ``/proc/cpuinfo``."""
    return " ".join(ours for theirs, ours in _ARM.items() if _number(f"hw.optional.{theirs}"))


def lower_quality() -> None:
    """Let the threads of others, and those of this process that compute steps, go before this thread."""
    lower = c_function("pthread_set_qos_class_self_np")
    if lower is not None:
        lower(_QOS_UTILITY, 0)
