"""Opening: what a launch thread needs to open a device that can be given up, beside a loop that goes on.

Importing torch loads libraries of hundreds of megabytes and runs their initialisers, and Python's import
keeps the interpreter's lock meanwhile: the loop would stand still, whichever thread makes the import.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

from aioinfer.execution.device import Progress

__all__ = ["Opening", "OpeningCancelled", "preload_torch"]

#: as torch loads them, in this order: the first one makes its symbols visible to the second
_LIBRARIES = (("libtorch_global_deps.so", "RTLD_GLOBAL"), ("libtorch_python.so", "RTLD_LOCAL"))


class OpeningCancelled(BaseException):
    """The engine was given up while its device was being opened. Not an Exception: handlers of errors on the
    way do not concern it."""


class Opening:
    """The ``progress`` of a device that is being opened; once it is cancelled, it raises OpeningCancelled.

    Whatever takes long calls it again and again, also when nothing is new: that is not passed on.
    """

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._last: tuple[str, int, int] | None = None
        self._cancelled = False

    def cancel(self) -> None:
        """Raise from the next call on. On any thread."""
        self._cancelled = True

    def __call__(self, stage: str, done: int, total: int) -> None:
        if self._cancelled:
            raise OpeningCancelled
        state = (stage, done, total)
        if self._progress is not None and state != self._last:
            self._last = state
            self._progress(stage, done, total)


def preload_torch() -> bool:
    """Load torch's libraries without the interpreter's lock, so that its import finds them loaded. Blocks.

    Returns whether they are loaded now. Where they are not, because torch is not installed or its files have
    other names, its import loads them as ever.
    """
    if "torch" in sys.modules:
        return True
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None or not hasattr(os, "RTLD_GLOBAL"):
        return False
    # A function that ctypes calls runs without the lock; ctypes.CDLL itself may keep it.
    load = ctypes.CDLL(None).dlopen
    load.restype, load.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    paths = [(Path(spec.origin).parent / "lib" / name, getattr(os, mode)) for name, mode in _LIBRARIES]
    return all(path.is_file() and load(os.fsencode(path), mode | os.RTLD_NOW) for path, mode in paths)
