"""Locks by name, and waiting that a cancellation does not cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from weakref import WeakValueDictionary

__all__ = ["NamedLocks", "apart", "finish"]

_T = TypeVar("_T")

#: what clean up behind coroutines that were closed
_apart: set[asyncio.Task[Any]] = set()


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


async def apart(work: Coroutine[Any, Any, _T], name: str) -> _T:
    """Await work that undoes what it has begun when it is cut short, in a task of its own: a coroutine that
    is closed at an await cannot wait for that. The work is cancelled then, and goes on undoing. When the
    caller is cancelled, that is waited for."""
    task = asyncio.get_running_loop().create_task(work, name=name)
    _apart.add(task)
    task.add_done_callback(_ended)
    try:
        return await finish(task, task.cancel)
    finally:
        task.cancel()


def _ended(task: asyncio.Task[Any]) -> None:
    _apart.discard(task)
    if not task.cancelled():
        task.exception()  # retrieved: its caller may have left
