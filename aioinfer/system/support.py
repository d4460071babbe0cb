"""Support: the systems on which models run."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from aioinfer.errors import ConfigError

__all__ = ["c_function", "check_system", "is_mac", "library_file"]

_WINDOWS = (
    "Windows is supported through WSL (the Windows Subsystem for Linux), not natively: run 'wsl --install', "
    "then install and start aioinfer in its terminal"
)


def check_system() -> None:
    """Raise ConfigError on a system where no model runs: native Windows. The scripted engine of
    :mod:`aioinfer.testing`, and what needs no engine, work there too."""
    if sys.platform in ("win32", "cygwin"):
        raise ConfigError(_WINDOWS)


def is_mac() -> bool:
    """Whether the system is macOS."""
    # By a name: mypy takes the comparison itself for false, and checks nothing behind it.
    name: str = sys.platform
    return name == "darwin"


def library_file(name: str) -> str:
    """The file name of a shared library."""
    return f"{name}.dylib" if is_mac() else f"{name}.so"


def c_function(name: str) -> Any:
    """A function of the C library; None where it has none of this name, or cannot be asked: on Windows."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None) if os.name == "posix" else None
