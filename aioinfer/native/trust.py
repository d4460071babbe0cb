"""Trust: files that decide what this process runs are read only where nobody else could have put them.

A file counts if it and its folder belong to this user or to root, and nobody else may write to them, as sshd
asks of keys (``StrictModes``). A folder may be like /tmp, where others can make files but not replace those
of this user. The folders above are not judged: who may rename those can only put other ones of this user or
of root in their place, because a file is checked, and then read, by its open descriptor.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

__all__ = ["NotTrusted", "check_folder", "make_folder", "open_trusted"]

#: a folder that can be searched but not listed will do
_FOLDER = getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_PATH", os.O_RDONLY)
#: neither through a link, nor waiting for the other end of a pipe
_FILE = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class NotTrusted(PermissionError):
    """Others could have written what is to be read. The message says what to mend."""


def check_folder(path: Path) -> None:
    """Raise NotTrusted if others may write to a folder, and another OSError if it cannot be opened."""
    os.close(_open_folder(path))


def make_folder(path: Path) -> None:
    """Make a folder, unless there is one, that others may read and not write. Raises as check_folder does."""
    path.mkdir(parents=True, exist_ok=True, mode=0o755)
    check_folder(path)


def open_trusted(path: Path) -> int:
    """The descriptor of a regular file, for reading, that only this user or root can have written.

    Raises NotTrusted, and another OSError if it cannot be opened.
    """
    folder = _open_folder(path.parent)
    try:
        opened = os.open(path.name, _FILE, dir_fd=folder)
    finally:
        os.close(folder)
    return _checked(opened, path)


def _open_folder(path: Path) -> int:
    return _checked(os.open(path, _FOLDER), path)


def _checked(opened: int, path: Path) -> int:
    """The descriptor, which is closed where this raises NotTrusted."""
    status = os.fstat(opened)
    is_folder = stat.S_ISDIR(status.st_mode)
    another = "or let AIOINFER_CACHE name another folder: one that is not there yet is made for this user"
    if status.st_uid not in (0, os.geteuid()):
        fault = f"belongs to another user (uid {status.st_uid}, this is {os.geteuid()}): chown it, {another}"
    elif status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (is_folder and status.st_mode & stat.S_ISVTX):
        mode = stat.S_IMODE(status.st_mode)
        fault = f"is writable for other users (mode {mode:03o}): 'chmod go-w' it, {another}"
    elif not is_folder and not stat.S_ISREG(status.st_mode):
        fault = "is neither a file nor a folder"
    else:
        return opened
    os.close(opened)
    raise NotTrusted(f"{path} {fault}")
