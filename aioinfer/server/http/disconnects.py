"""Clients that disconnect: noticed within half a second, and quietly."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from aiohttp import web

__all__ = ["WATCH_INTERVAL", "ClientGone", "ended", "is_gone", "unless_gone", "unless_raises"]

_T = TypeVar("_T")
#: seconds between checks of a connection
WATCH_INTERVAL = 0.5


class ClientGone(ConnectionError):
    """The client has closed its connection, or has not read for ``send_timeout`` seconds."""


def is_gone(request: web.Request) -> bool:
    """The connection of a request is closed."""
    return request.transport is None or request.transport.is_closing()


async def unless_gone(request: web.Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Await ``work``; raises ClientGone if the client disconnects first.

    :func:`aioinfer.server.serve` cancels handlers on disconnect; an application with these routes may not.
    """
    task = asyncio.get_running_loop().create_task(work)
    try:
        while not task.done():
            if is_gone(request):
                raise ClientGone("the client has closed its connection")
            await asyncio.wait([task], timeout=WATCH_INTERVAL)
        return task.result()
    finally:
        await ended(task)


async def unless_raises(watch: asyncio.Task[None], work: Coroutine[Any, Any, None]) -> None:
    """Await ``work``; raises the exception of ``watch`` if it ends first."""
    task = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        else:
            watch.result()
    finally:
        await ended(task)


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait for its end. Its exception, if any, counts as retrieved."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])
    if not task.cancelled():
        task.exception()
