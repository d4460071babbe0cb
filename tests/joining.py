"""Join threads that a test found by name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable


def still_alive(threads: Iterable[threading.Thread], timeout: float = 10.0) -> list[str]:
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
