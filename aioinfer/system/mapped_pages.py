"""Pages of mapped files: taken out of this process's memory when what is in them has been read."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from aioinfer.system.support import c_function

__all__ = ["give_back"]

#: madvise(2) on Linux
_DONTNEED = 4


def give_back(files: Iterable[Path], read: Collection[int]) -> None:
    """Take the pages of mapped files out of this process's memory. They stay in the system's cache, and come
    back as they are touched. Where that cannot be done, nothing is.

    Args:
        read: addresses in mappings that could be written to, and were not. Others of the same files are left
            alone: what was written there would be lost.
    """
    names = {os.path.realpath(file) for file in files}
    with suppress(OSError, AttributeError):
        advise = c_function("madvise")
        advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            for line in maps:
                place, rights, _, _, _, *name = line.rstrip("\n").split(maxsplit=5)
                if not name or name[0] not in names:
                    continue
                start, end = (int(part, 16) for part in place.split("-"))
                if "w" not in rights or any(start <= each < end for each in read):
                    advise(start, end - start, _DONTNEED)
