"""Saved sessions: files below ``sessions_dir``, in a private directory for each key, by names that are no
paths."""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

from aioinfer.errors import InvalidRequest, shown
from aioinfer.server.http.failures import Failure, Refused, not_found

__all__ = ["SavedSessions"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_ENDING = ".session"
_PRIVATE = 0o700


class SavedSessions:
    """The files. All methods block but :meth:`check`. Messages say no paths."""

    def __init__(self, root: str | None, most: int) -> None:
        """``most``: files of a key."""
        self._root = root
        self._most = most

    def check(self, name: str) -> None:
        """Raise Refused (403) if sessions cannot be saved, and InvalidRequest for a name that is none."""
        if self._root is None:
            message = "this server saves no sessions: its sessions_dir is not set"
            raise Refused(Failure(403, "permission_error", message, code="sessions_dir_not_set"))
        if not _NAME.fullmatch(name):
            raise InvalidRequest(
                "name", f"must be 1 to 64 letters, digits, _ and -, the first no sign, got {shown(name)}"
            )

    def names(self, owner: str) -> list[str]:
        """The names of a key's files. Raises as :meth:`check`, and Refused (500)."""
        self.check("x")
        return sorted(each.name.removesuffix(_ENDING) for each in self._files(self._folder(owner)))

    def place(self, owner: str, name: str) -> Path:
        """The path to which a session is saved. Raises as :meth:`names`; Refused (429): the key has as many
        files as it may."""
        self.check(name)
        folder = self._folder(owner)
        path, there = folder / (name + _ENDING), self._files(folder)
        if path not in there:
            if os.path.lexists(path):
                raise _unusable("one of its entries is no file")
            if len(there) >= self._most:
                count = len(there)
                message = f"the key has {count} saved sessions, its limit (max_sessions_per_key): delete one"
                raise Refused(Failure(429, "rate_limit_error", message, code="session_limit_exceeded"))
        return path

    def find(self, owner: str, name: str) -> Path:
        """The file of a name, which is a regular one. Raises as :meth:`names`; Refused (404): there is
        none."""
        self.check(name)
        path = self._folder(owner) / (name + _ENDING)
        if path not in self._files(path.parent):
            raise not_found("saved_session", name, "name")
        return path

    def remove(self, owner: str, name: str) -> None:
        """Delete a file. Raises as :meth:`find`."""
        self.find(owner, name).unlink(missing_ok=True)

    def _folder(self, owner: str) -> Path:
        """The directory of a key, which belongs to this user alone. Raises Refused (500)."""
        assert self._root is not None
        # Keys whose names differ in case only have different ones on every file system.
        root = Path(self._root).expanduser()
        folder = root / hashlib.sha256(owner.encode()).hexdigest()[:32]
        try:
            root.mkdir(_PRIVATE, parents=True, exist_ok=True)
            folder.mkdir(_PRIVATE, exist_ok=True)
            found = folder.lstat()
        except OSError as error:
            raise _unusable(error.strerror or type(error).__name__) from error
        if not stat.S_ISDIR(found.st_mode):
            raise _unusable("one of its entries is no directory")
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise _unusable("one of its directories is not this user's alone")
        return folder

    def _files(self, folder: Path) -> list[Path]:
        """Its regular files with names of sessions; links are none."""
        try:
            with os.scandir(folder) as entries:
                return [
                    folder / each.name
                    for each in entries
                    if each.name.endswith(_ENDING)
                    and _NAME.fullmatch(each.name.removesuffix(_ENDING))
                    and each.is_file(follow_symlinks=False)
                ]
        except OSError as error:
            raise _unusable(error.strerror or type(error).__name__) from error


def _unusable(why: str) -> Refused:
    return Refused(Failure(500, "server_error", f"the sessions_dir of this server cannot be used: {why}"))
