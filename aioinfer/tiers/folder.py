"""Folder: a private directory for pages, and a place in it where this process writes.

KV tells what was said, so nobody else may read it; and what others can write is not read. A directory that is
made here has mode 700. One that is there belongs to this user and has no rights for others; an empty one is
given these rights.

What is written has its place until it is whole: a folder of its own, with a lock beside it that nobody holds
when the process has ended, however it did. Such left-overs are removed by whoever comes next.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import threading
from contextlib import suppress

from aioinfer.errors import ConfigError
from aioinfer.system.locks import lock_file
from aioinfer.tiers.records import Descriptor

__all__ = ["DIRECTORY", "SUBFOLDERS", "Folder"]

#: a directory, and not through a link
DIRECTORY = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_NOFOLLOW", 0)
#: names of the folders in it
SUBFOLDERS = [f"{number:02x}" for number in range(256)]
_PLACE = re.compile(r"(writing-[0-9a-f]{16})(\.lock)?")
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


class Folder:
    """An open private directory. It is closed, and its place for writing removed, with its last user.

    Attributes:
        path: of the directory.
        fd: its descriptor: files are named relative to it.
    """

    def __init__(self, path: str, *, make: bool) -> None:
        """Open it; where ``make``, make it if it is not there. Raises ConfigError: it cannot be opened, or is
        not this user's alone."""
        self.path = path
        self._place = ""
        #: whose lock is that of the place
        self._lock: Descriptor | None = None
        self._mutex = threading.Lock()
        self._pid = os.getpid()
        try:
            if make:
                os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
                with suppress(FileExistsError):
                    os.mkdir(path, 0o700)
            if os.path.islink(path):
                raise ConfigError(f"{path} is a symbolic link: name the directory itself")
            self._root = Descriptor(os.open(path, DIRECTORY))
            self.fd = self._root.number
            self._check()
        except OSError as error:
            raise ConfigError(f"{path} cannot be a directory of pages: {error.strerror or error}") from error

    def __del__(self) -> None:
        if self._place and self._pid == os.getpid():
            with suppress(OSError):
                self._remove(self._place)

    def _check(self) -> None:
        status = os.fstat(self.fd)
        if status.st_uid != os.geteuid():
            raise ConfigError(
                f"{self.path} belongs to another user (uid {status.st_uid}, this is {os.geteuid()}): "
                "name a directory of this user, or one that is not there yet"
            )
        if status.st_mode & _OTHERS:
            if not os.listdir(self.fd):
                os.fchmod(self.fd, 0o700)
            if os.listdir(self.fd):  # also what others have put there meanwhile
                mode = f"{stat.S_IMODE(status.st_mode):03o}"
                raise ConfigError(
                    f"{self.path} is open to others (mode {mode}) and has files: name a directory that is "
                    "empty or not there yet, or 'chmod 700' it if nobody else has written there"
                )
        for name in SUBFOLDERS:
            with suppress(FileNotFoundError):
                inner = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
                if not stat.S_ISDIR(inner.st_mode) or inner.st_uid != os.geteuid():
                    raise ConfigError(f"{self.path}/{name} is no directory of this user: remove it")

    def is_current(self) -> bool:
        """Whether this directory is still what its path names."""
        try:
            return os.path.samestat(os.lstat(self.path), os.fstat(self.fd))
        except OSError:
            return False

    def place(self) -> str:
        """Where this process writes files before they are whole, within the directory. Raises OSError."""
        with self._mutex:
            if not self._place:
                name = f"writing-{secrets.token_hex(8)}"
                self._lock = Descriptor(lock_file(f"{name}.lock", dir_fd=self.fd))
                os.mkdir(name, 0o700, dir_fd=self.fd)
                self._place = name
            return self._place

    def forget_place(self, name: str) -> None:
        """Make another place next time: this one was removed."""
        with self._mutex:
            if self._place == name:
                self._place = ""

    def sweep(self) -> None:
        """Remove the places of processes that have ended."""
        with self._mutex, suppress(OSError):
            found = {match[1] for each in os.listdir(self.fd) if (match := _PLACE.fullmatch(each))}
            for place in found - {self._place}:
                with suppress(OSError):  # another process has the lock, or nothing can be removed here
                    held = Descriptor(lock_file(f"{place}.lock", dir_fd=self.fd))
                    self._remove(place)
                    del held

    def _remove(self, place: str) -> None:
        """Remove a place and, last, its lock, which this process holds. Raises OSError."""
        with suppress(FileNotFoundError):
            opened = Descriptor(os.open(place, DIRECTORY, dir_fd=self.fd))
            for name in os.listdir(opened.number):
                os.unlink(name, dir_fd=opened.number)
            os.rmdir(place, dir_fd=self.fd)
        with suppress(FileNotFoundError):
            os.unlink(f"{place}.lock", dir_fd=self.fd)
