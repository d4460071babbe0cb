"""until_disconnected: work for a client that ends when the client leaves, in the handlers of web frameworks.

A streamed answer is cancelled by the frameworks themselves. A handler that awaits its answer is not: FastAPI
and Starlette notice a disconnect only where the request is read, and aiohttp where it is told to
(``handler_cancellation``).
"""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Awaitable
from typing import Any, NoReturn, TypeVar

from aioinfer.system import sockets

__all__ = ["hung_up", "until_disconnected"]

_T = TypeVar("_T")
#: nginx's status of a connection that its client has closed
_CLIENT_GONE = 499
#: seconds between checks of a connection of aiohttp's, which has no event for its end
_INTERVAL = 0.25


def hung_up(transport: asyncio.BaseTransport | None) -> bool:
    """Whether the peer of a transport has closed it or will send nothing more.

    A transport learns of that when it reads. It does not while its protocol has paused it, because requests
    or other data wait there that nothing takes; so the system is asked.
    """
    if transport is None or transport.is_closing():
        return True
    socket = transport.get_extra_info("socket")
    if socket is None:
        return False
    try:
        return sockets.hung_up(socket)
    except (OSError, ValueError):  # it was closed meanwhile
        return True


async def until_disconnected(request: Any, work: Awaitable[_T]) -> _T:
    """The result of ``work``, which is cancelled when the client leaves.

    ::

        @app.post("/summaries")
        async def summary(request: Request, text: str) -> str:
            return (await until_disconnected(request, engine.generate(text))).text

    Args:
        request: a request of FastAPI, Starlette or aiohttp. With the first two, its body must have been read:
            later messages are read here.
        work: a stream, a chat, or any other awaitable.

    Raises:
        The framework's ``HTTPException`` of status 499 when the client has left; it reaches no client.
        TypeError: the request is of another framework.
        RuntimeError: the body of the request has not been read.
    """
    if hasattr(request, "receive") and hasattr(request, "scope"):
        watching, leave = _starlette_gone(request), _leave_starlette
    elif hasattr(request, "transport") and hasattr(request, "protocol"):
        watching, leave = _aiohttp_gone(request), _leave_aiohttp
    else:
        raise TypeError(f"a request of FastAPI, Starlette or aiohttp is needed, not {type(request).__name__}")
    try:
        task: asyncio.Future[_T] = asyncio.ensure_future(work)
    except BaseException:
        watching.close()
        raise
    watch: asyncio.Task[None] = asyncio.ensure_future(watching)
    try:
        both: list[asyncio.Future[Any]] = [task, watch]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        watch.result()
        leave()
    finally:
        await _ended(task, watch)


async def _ended(*futures: asyncio.Future[Any]) -> None:
    """Cancel the futures that have not ended, and wait. Exceptions count as retrieved."""
    running = [each for each in futures if not each.done()]
    for each in running:
        each.cancel()
    if running:
        await asyncio.wait(running)
    for each in futures:
        if not each.cancelled():
            each.exception()


async def _starlette_gone(request: Any) -> None:
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            return
        if message.get("body"):
            raise RuntimeError("read the body of the request before until_disconnected")


def _leave_starlette() -> NoReturn:
    # FastAPI's class derives from Starlette's; its applications catch it.
    home = sys.modules.get("fastapi.exceptions") or importlib.import_module("starlette.exceptions")
    raise home.HTTPException(_CLIENT_GONE, "the client has closed its connection")


async def _aiohttp_gone(request: Any) -> None:
    while not hung_up(request.transport):  # noqa: ASYNC110
        await asyncio.sleep(_INTERVAL)


def _leave_aiohttp() -> NoReturn:
    from aiohttp import web

    class ClientGone(web.HTTPClientError):
        status_code = _CLIENT_GONE

    raise ClientGone(reason="the client has closed its connection")
