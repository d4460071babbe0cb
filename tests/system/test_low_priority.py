"""Threads of low priority."""

from __future__ import annotations

import os
import sys
import threading

import pytest

from aioinfer.system.low_priority import at_low_priority


def test_work_is_done_at_a_low_priority_and_others_keep_theirs() -> None:
    def priority() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = priority()
    own = sys.platform == "linux"  # elsewhere threads have no priority of their own
    assert at_low_priority(priority) == (max(before, 10) if own else before)
    assert priority() == before


def test_what_it_raises_is_raised() -> None:
    def fail() -> None:
        raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        at_low_priority(fail)
