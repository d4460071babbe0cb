"""Work and memory as counts, which a busy machine does not change."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_collection() -> Iterator[None]:
    """No finalizer of what another test has left runs where calls are counted, or made to fail."""
    thresholds = gc.get_threshold()
    gc.set_threshold(0)  # an engine may ask whether the collector is enabled
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def calls_of(work: Callable[[], Any]) -> int:
    """Functions that ``work`` calls, those of C included."""
    count = 0

    def called(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    with no_collection():
        sys.setprofile(called)
        try:
            work()
        finally:
            sys.setprofile(None)
    return count


def most_kept(push: Callable[[str], Any], parts: Iterable[str]) -> int:
    """Bytes that are kept, at most, between the parts of a text: what is not kept is not read again."""
    most = 0
    tracemalloc.start()
    try:
        for number, part in enumerate(parts):
            push(part)
            if number % 1000 == 0:
                gc.collect()  # or garbage counts, of which there may be any amount
                most = max(most, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    return most
