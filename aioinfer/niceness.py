"""Work that must not take processor time from the model's threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["gently"]

_T = TypeVar("_T")

#: of a thread's priority: some 10 % of a core that another thread wants, too
_NICENESS = 10


def gently(call: Callable[[], _T]) -> _T:
    """The result of a call that hardly ever holds the interpreter's lock, made on a thread of low priority.

    A thread of low priority that holds the lock makes all others wait for it, for as long as the system runs
    threads of higher priority instead: only large pieces of work without the lock belong here. Of Linux alone
    threads have a priority of their own.
    """
    future: Future[_T] = Future()
    threading.Thread(target=_run, args=(call, future), name="aioinfer-gently", daemon=True).start()
    try:
        return future.result()
    finally:
        del future  # which an error would refer to by its traceback


def _run(call: Callable[[], _T], future: Future[_T]) -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
