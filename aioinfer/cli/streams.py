"""Standard streams of commands, which may be closed, full, or pipes that nobody reads any more."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from aioinfer.errors import ConfigError

__all__ = ["OutputLost", "check_output", "note", "open_streams", "settle_streams", "write"]


class OutputLost(Exception):
    """Standard output takes no more text."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"standard output: {cause.strerror}")
        #: nobody reads it any more, as behind ``head``; what is written to it from now on goes nowhere
        self.unread = cause.errno == errno.EPIPE
        #: exit status of a command whose output it was; unread, that of a program which SIGPIPE ends
        self.status = 141 if self.unread else 1


def open_streams() -> None:
    """Open /dev/null for standard streams that are closed, before any other file gets one of their numbers:
    libuv, by which uvloop works, aborts the process when it closes such a file."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            # It gets the lowest number that is free.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115


def settle_streams() -> None:
    """Drop what cannot be written when a command ends: the interpreter would exit with status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            _discard(stream)


def write(text: str, end: str = "\n") -> None:
    """Write the output of a command, at once. Raises OutputLost, the first time that this is not possible."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        # A lone surrogate has no bytes.
        sys.stdout.write((text + end).encode(encoding, "replace").decode(encoding))
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        raise OutputLost(error) from error


def check_output(path: Path) -> None:
    """Raises ConfigError: a file that a command is to write after its work has no place."""
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(f"{path}: no file in a directory that there is")


def note(text: str) -> None:
    """Write a line to standard error, if that is possible."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _discard(stream: Any) -> None:
    """Send what a stream still holds, and all that follows, to /dev/null."""
    with suppress(OSError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
