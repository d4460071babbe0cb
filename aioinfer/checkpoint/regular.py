"""Regular files: what is read of a directory that others may write to.

A pipe would keep its reader for good, a device has no end, and a link can lead anywhere: files are looked at
before any of them is opened.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

from aioinfer.errors import ConfigError, shown

__all__ = ["check_regular"]


def check_regular(files: Iterable[Path], root: Path | None = None) -> None:
    """Raise ConfigError unless all of these are regular files, behind links, too; with ``root``, which has no
    links in it, files that lie in it. The message has their names only, and says the same of whatever lies
    outside."""
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
