"""The ASGI application: it keeps an aiohttp application and passes requests to it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable

from aiohttp import web

from aioinfer.config import ServerConfig
from aioinfer.engine import EngineState
from aioinfer.engine_like import EngineLike
from aioinfer.errors import AioInferError
from aioinfer.loop.loop_bound import asyncio_loop
from aioinfer.server.asgi.exchange import Exchange
from aioinfer.server.asgi.scopes import Receive, Scope, Send
from aioinfer.server.http.failures import Failure
from aioinfer.server.http.logs import ACCESS, HTTP, AccessLog, Throttle

__all__ = ["AsgiApplication"]

_log = logging.getLogger("aioinfer.server")

_NOT_STARTED = (
    "the engine is not started: servers run the lifespan of the outermost application only, so the one in "
    "which this is mounted has to start it in its own lifespan, with 'async with engine: yield'"
)


class AsgiApplication:
    """An application of ASGI 3, for :func:`aioinfer.server.asgi_app`.

    A server that runs it alone starts and closes the engine by its lifespan. Where it is mounted in another
    application, that one does; requests get 503 before.
    """

    def __init__(self, engine: EngineLike, config: ServerConfig, make: Callable[[], web.Application]) -> None:
        """``make`` makes the aiohttp application, one for each event loop. Raises what it raises."""
        self._engine = engine
        self._make = make
        self._log = AccessLog(ACCESS, config.access_log_format) if config.access_log else None
        self._next: web.Application | None = make()
        self._life: _Life | None = None
        self._unstarted = Throttle(_log)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        match scope["type"]:
            case "http":
                await self._http(scope, receive, send)
            case "lifespan":
                await self._lifespan(receive, send)
            case "websocket":
                await receive()
                await send(
                    {"type": "websocket.close", "code": 1000, "reason": "there are no WebSockets here"}
                )
            case other:
                raise ValueError(f"scopes of type {other!r} are unknown")

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        life = self._life
        if life is None or life.loop is not asyncio_loop():
            if self._engine.state in (EngineState.NEW, EngineState.CLOSED):
                self._unstarted.warning(_NOT_STARTED)
                await _refuse(send, _NOT_STARTED)
                return
            life = self._begin()
        await Exchange(await life.server(), scope, receive, send).run(self._log)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        await receive()
        life = self._begin()
        try:
            await life.server()  # starts the engine
        except Exception as error:
            await self._end(life, drain=False)
            if not isinstance(error, AioInferError):
                _log.error("the application could not be started", exc_info=error)
            await send({"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"})
            return
        except BaseException:
            await self._end(life, drain=False)
            raise
        try:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        except BaseException:
            await self._end(life, drain=False)
            raise
        await self._end(life, drain=True)
        await send({"type": "lifespan.shutdown.complete"})

    def _begin(self) -> _Life:
        app, self._next = self._next or self._make(), None
        self._life = _Life(app)
        return self._life

    async def _end(self, life: _Life, *, drain: bool) -> None:
        if self._life is life:
            self._life = None
        await life.end(drain=drain)


class _Life:
    """An aiohttp application on one event loop, from the start of an engine to its end."""

    def __init__(self, app: web.Application) -> None:
        self.loop = asyncio_loop()
        self._runner = web.AppRunner(app, access_log=None, logger=HTTP)
        self._starting = asyncio.Lock()

    async def server(self) -> web.Server:
        """What makes its requests and handles them; the first call starts the application."""
        async with self._starting:
            if self._runner.server is None:
                await self._runner.setup()
        server = self._runner.server
        assert server is not None
        return server

    async def end(self, *, drain: bool) -> None:
        """Close the engine, if the application has started it; the requests under way may finish before if
        ``drain``."""
        await (self._runner.cleanup() if drain else self._runner.app.cleanup())


async def _refuse(send: Send, message: str) -> None:
    failure = Failure(503, "service_unavailable_error", message, code="engine_not_started")
    body = json.dumps(failure.body()).encode()
    headers = [
        (b"content-type", b"application/json; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        (b"retry-after", b"5"),
    ]
    await send({"type": "http.response.start", "status": failure.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
