"""The CUDA device of an engine: its choice, and its use on several threads.

The current device is a thread's own, and a thread that an engine starts begins with the first one. So the
caller's is read where the engine is made. An engine makes its device the current one while it works on it,
and restores the former one: a loop's thread, on which steps are launched with ``launch_mode="inline"``,
belongs to the application.
"""

from __future__ import annotations

import contextlib
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["callers_device", "current", "pick_device"]


def callers_device() -> int:
    """Index of the calling thread's current CUDA device. Imports no torch: where that was not imported or has
    not used CUDA, none was chosen, and it is the first."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return int(cuda.current_device()) if cuda is not None and cuda.is_initialized() else 0


def pick_device(wanted: str, index: int | None = None) -> torch.device:
    """The device that ``auto``, ``cpu``, ``cuda`` or ``cuda:1`` means on this machine. Raises ConfigError.

    Args:
        index: of the device that ``cuda`` without a number is; None: the calling thread's.
    """
    import torch

    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device(wanted)
    if not torch.cuda.is_available():
        raise ConfigError(f"device: {wanted} was asked for, and torch sees no CUDA device")
    name, _, number = wanted.partition(":")
    if number:
        index = int(number)
    elif index is None:
        index = torch.cuda.current_device()
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(f"device: {wanted} was asked for, and torch sees {count} CUDA devices, from 0 on")
    return torch.device(name, index)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a CUDA device the thread's current one meanwhile; do nothing for other devices."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
