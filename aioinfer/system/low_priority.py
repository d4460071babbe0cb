"""Calls on a thread of low priority, which leave processor time to the model's threads."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from aioinfer.system import mac
from aioinfer.system.support import is_mac

__all__ = ["at_low_priority"]

_T = TypeVar("_T")

#: gets some 10 % of a core that another thread wants, too
_NICENESS = 10


def at_low_priority(call: Callable[[], _T]) -> _T:
    """The result of a call, made on a thread of low priority where threads have one: on Linux and macOS.

    For large pieces of work that release the interpreter's lock. A thread of low priority that holds the lock
    makes all others wait for as long as the system runs threads of higher priority instead.
    """
    future: Future[_T] = Future()
    threading.Thread(target=_run, args=(call, future), name="aioinfer-low-priority", daemon=True).start()
    try:
        return future.result()
    finally:
        del future  # which an error would refer to by its traceback


def _run(call: Callable[[], _T], future: Future[_T]) -> None:
    if is_mac():
        mac.lower_quality()
    elif sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    try:
        result = call()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
