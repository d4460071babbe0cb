"""Confinement: paths that requests name, in the directory to which the config confines them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from aioinfer.checkpoint.regular import check_regular
from aioinfer.errors import ConfigError, InvalidRequest, shown

__all__ = ["LONGEST_PATH", "Confined"]

LONGEST_PATH = 4096
#: files below a directory that are looked at
_MOST_FILES = 10_000


class Confined:
    """The paths in one directory. ``setting``: which of the config it is; ``field``: which of the body names
    a path."""

    def __init__(self, root: str, setting: str, field: str) -> None:
        self._root = root
        self._setting = setting
        self._field = field

    def find(self, path: str) -> Path:
        """Resolve a path in the directory. Blocks. Raises InvalidRequest, which does not tell whether a path
        outside exists."""
        if "\0" in path:
            raise self._bad("has a NUL character")
        if len(path) > LONGEST_PATH:
            raise self._bad(f"is longer than {LONGEST_PATH} characters")
        top = self._top()
        try:
            found = (top / path).resolve()
            inside = found.is_relative_to(top)
            there = inside and found.exists()
        except (OSError, RuntimeError, ValueError):  # a loop of links, a name that is too long
            raise self._bad(f"{shown(path)} cannot be followed") from None
        if not inside:
            raise self._bad(f"{shown(path)} lies outside of {self._setting}")
        if not there:
            raise self._bad(f"there is nothing at {shown(path)} in {self._setting}")
        return found

    def directory(self, path: str, names: tuple[str, ...]) -> Path:
        """Resolve a directory, where files with these names are regular files in the root, if they exist."""
        found = self.find(path)
        if not found.is_dir():
            raise self._bad(f"there is no directory {shown(path)} in {self._setting}")
        self._check(found / name for name in names if os.path.lexists(found / name))
        return found

    def whole(self, path: str) -> Path:
        """Resolve a path where every file below is a regular one in the root; of a file, also those beside it
        with the same ending."""
        found = self.find(path)
        try:
            if found.is_dir():
                self._check(self._below(found))
            else:
                self._check(
                    [found, *(each for each in found.parent.iterdir() if each.suffix == found.suffix)]
                )
        except OSError as error:
            raise self._bad(f"{shown(path)} cannot be read: {error.strerror}") from None
        return found

    def _below(self, directory: Path) -> Iterator[Path]:
        count = 0
        for where, directories, files in os.walk(directory):
            # Links to directories are not walked, but have to stay in the root, too.
            links = [each for each in directories if (Path(where) / each).is_symlink()]
            for name in links:
                if not (Path(where) / name).resolve().is_relative_to(self._top()):
                    raise self._bad(f"{shown(name)} is a link that leads outside of {self._setting}")
            for name in files:
                count += 1
                if count > _MOST_FILES:
                    raise self._bad(f"it has more than {_MOST_FILES} files")
                yield Path(where) / name

    def _check(self, files: Iterator[Path] | list[Path]) -> None:
        try:
            check_regular(files, self._top())
        except ConfigError as error:
            raise self._bad(
                str(error).replace("leads outside", f"leads outside of {self._setting}")
            ) from None

    def said(self, error: Exception) -> str:
        """The message of an error without the path of the root."""
        try:
            top = self._top()
        except InvalidRequest:
            return str(error)
        if top == top.parent:
            return str(error)
        return str(error).replace(f"{top}{os.sep}", "").replace(str(top), self._setting)

    def _top(self) -> Path:
        try:
            return Path(self._root).expanduser().resolve(strict=True)
        except (OSError, RuntimeError, ValueError):
            raise self._bad(f"the {self._setting} of this server is not there") from None

    def _bad(self, message: str) -> InvalidRequest:
        return InvalidRequest(self._field, message)
