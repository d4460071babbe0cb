"""Waiting for the end of threads and processes that a test has started."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable

import psutil

__all__ = ["arguments", "still_alive", "still_running"]


def still_alive(threads: Iterable[threading.Thread], timeout: float = 60.0) -> list[str]:
    """Join the threads; names of those that have not ended after ``timeout`` seconds.

    ``threading.enumerate`` also lists threads that are being started, which cannot be joined yet.
    """
    end = time.monotonic() + timeout
    left = []
    for thread in threads:
        while not thread.is_alive() and thread in threading.enumerate() and time.monotonic() < end:
            os.sched_yield()
        if thread.is_alive():
            thread.join(max(0.0, end - time.monotonic()))
        if thread.is_alive():
            left.append(thread.name)
    return left


def arguments(process: psutil.Process) -> list[str]:
    """Of a process that runs; none of one that has ended, or is a zombie until its parent has reaped it."""
    try:
        found: list[str] = process.cmdline()
        return found
    except psutil.NoSuchProcess:  # zombies included
        return []


def still_running(processes: Iterable[psutil.Process], timeout: float = 120.0) -> list[psutil.Process]:
    """Wait for the end of the processes; those that have not ended after ``timeout`` seconds.

    A zombie has ended: whether it is reaped is up to its parent, which may have ended before.
    """
    end = time.monotonic() + timeout
    left = [*processes]
    while (left := [each for each in left if _runs(each)]) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
