"""Locks by name, and waiting that a cancellation does not cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar
from weakref import WeakValueDictionary

__all__ = ["NamedLocks", "finish"]

_T = TypeVar("_T")


class NamedLocks:
    """A lock for each name, kept while it is in use."""

    __slots__ = ("_locks",)

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def __getitem__(self, name: str) -> asyncio.Lock:
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock


async def finish(work: Awaitable[_T], when_cancelled: Callable[[], object] | None = None) -> _T:
    """Wait for work that must not be left while it runs, and return its result.

    If the caller is cancelled meanwhile, ``when_cancelled`` is called, once, and CancelledError is raised
    when the work has ended, whatever its result.
    """
    future = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait((future,))
        except asyncio.CancelledError as error:
            if cancelled is None and when_cancelled is not None:
                when_cancelled()
            cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # retrieved: often that of having been stopped
        raise cancelled
    return future.result()
