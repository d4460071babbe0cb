"""What a child of a fork must know. It has copies of all objects, and of threads only the one that forked:
what the others computed, or held a lock for, stands still in the child for good."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Protocol

__all__ = ["drop_file", "forked_here", "in_children", "this_process"]

#: stands for this process; a child has another one
_process = object()
#: the thread that forked, in a child
_forked_on: int | None = None


def in_children(call: Callable[[], None]) -> Callable[[], None]:
    """Have ``call`` called at the beginning of every child: it takes no lock and waits for nothing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=call)
    return call


@in_children
def _forked() -> None:
    global _process, _forked_on
    _process, _forked_on = object(), threading.get_ident()


def this_process() -> object:
    """An object that is another one in each child."""
    return _process


def forked_here() -> bool:
    """This thread has come here from a parent: the threads with which OpenMP divided its work there are not
    here, and an operation of torch that is to be divided would wait for them."""
    return _forked_on == threading.get_ident()


class _File(Protocol):
    def fileno(self) -> int: ...


def drop_file(file: _File) -> None:
    """In a child: not hold open what its parent has opened, whose other end waits for the last holder. The
    number stays taken, so that whatever closes the file here closes nothing else."""
    number = file.fileno()
    if number >= 0:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, number, inheritable=False)
        os.close(null)
