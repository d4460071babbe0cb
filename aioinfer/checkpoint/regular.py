"""Regular files in a directory that comes from others, or that others may write to.

A pipe would keep its reader for good, a device has no end, and a link can lead anywhere: files are checked
before any of them is opened, and again when they are open, since they may have been replaced.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from io import FileIO
from pathlib import Path

from aioinfer.errors import ConfigError, shown
from aioinfer.system.files import open_at_once

__all__ = ["check_regular", "open_regular", "read_regular"]


def check_regular(files: Iterable[Path], root: Path | None = None) -> None:
    """Raise ConfigError unless all of these are regular files, or links to such; with ``root``, which has no
    links in it, files inside it. The message has their names only, and does not depend on files outside."""
    for file in files:
        try:
            found = file.resolve()
            inside = root is None or found.is_relative_to(root)
            regular = inside and stat.S_ISREG(found.stat().st_mode)
        except (OSError, RuntimeError, ValueError):  # a loop of links, or a link to nothing
            raise ConfigError(f"{shown(file.name)} cannot be read") from None
        if not inside:
            raise ConfigError(f"{shown(file.name)} is a link that leads outside")
        if not regular:
            raise ConfigError(f"{shown(file.name)} is no regular file")


def open_regular(file: Path, most_bytes: int) -> tuple[FileIO, int]:
    """A file to be read, and its size. Never waits for another process, as opening a pipe does. Raises
    OSError, and ValueError: it is no regular file, or larger than ``most_bytes``."""
    descriptor = open_at_once(file)
    opened = os.fdopen(descriptor, "rb", buffering=0)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if status.st_size > most_bytes:
            raise ValueError(f"it has {status.st_size} bytes; {most_bytes} are the most that are read")
    except BaseException:
        opened.close()
        raise
    return opened, status.st_size


def read_regular(file: Path, most_bytes: int) -> bytes:
    """What is in a file. Raises OSError, and ValueError as :func:`open_regular` does."""
    opened, _ = open_regular(file, most_bytes)
    with opened:
        return opened.read()
