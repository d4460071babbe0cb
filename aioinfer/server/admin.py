"""Admin routes: what an operator may do to an engine. They have sockets of their own, and are on no other.

Those sockets are on loopback or Unix sockets, and web pages are refused whatever they are: a request with an
``Origin``, or for another host than a loopback name, is a 403.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from typing import Annotated, Any, Literal, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from pydantic import Field

from aioinfer.chat.bodies import Object, admit, field
from aioinfer.client.engine_like import EngineLike
from aioinfer.config import ServerConfig, is_loopback
from aioinfer.errors import ConfigError, InvalidRequest, OutOfMemory
from aioinfer.ledger import LEDGER
from aioinfer.server.adapters import Adapters, LoadBody, UnloadBody
from aioinfer.server.confinement import Confined
from aioinfer.server.http.access import host_name
from aioinfer.server.http.failures import Failure, Refused, as_failure
from aioinfer.server.http.keys import Keys
from aioinfer.server.http.objects import json_object
from aioinfer.server.http.records import add_headers, recorded
from aioinfer.server.status import send_trace

__all__ = ["ADMIN_HOST", "admin_application"]

ADMIN_HOST = "127.0.0.1"
_LARGEST_BODY = 1 << 16
#: seconds that a trace may collect
_LONGEST_TRACE = 60.0
_ObjectT = TypeVar("_ObjectT", bound=Object)


class UpdateBody(Object):
    """A body of ``/update_weights``; the engine checks how, and the version."""

    path: Annotated[str, Field(min_length=1)] = field("a path below ``weights_root``", ...)
    mode: Any = field("what running requests do", "keep")
    version: Any = field("the number of the weights")


class DrainBody(Object):
    """A body of ``/drain``."""

    timeout: Annotated[float, Field(ge=0, le=86_400)] | None = field("seconds")


class AbortBody(Object):
    """A body of ``/abort``."""

    request_id: Annotated[str, Field(min_length=1)] = field("the id of an answer, or ``X-Request-ID``", ...)


class LevelBody(Object):
    """A body of ``/log-level``."""

    level: Literal["debug", "info", "warning", "error"] = field("of the loggers of this package", ...)


def admin_application(engine: EngineLike, config: ServerConfig, *outer: Middleware) -> web.Application:
    """The admin routes of an engine, within ``outer`` middlewares."""
    routes = _AdminRoutes(engine, config)
    app = web.Application(middlewares=[recorded, *outer, _guard(config)], client_max_size=_LARGEST_BODY)
    app.on_response_prepare.append(add_headers)
    app.add_routes(
        [
            web.get("/stats", routes.stats),
            web.get("/trace", routes.trace),
            web.get("/log-level", routes.log_level),
            web.put("/log-level", routes.set_log_level),
            web.post("/pause", routes.pause),
            web.post("/resume", routes.resume),
            web.post("/flush", routes.flush),
            web.post("/abort", routes.abort),
            web.post("/drain", routes.drain),
            web.post("/v1/load_lora_adapter", routes.load_adapter),
            web.post("/v1/unload_lora_adapter", routes.unload_adapter),
        ]
    )
    if config.weights_root is not None:
        app.router.add_post("/update_weights", routes.update_weights)
    return app


class _AdminRoutes:
    def __init__(self, engine: EngineLike, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config
        self._adapters = Adapters(engine, config, config.model_names or (engine.config.model_name,))

    async def stats(self, request: web.Request) -> web.StreamResponse:
        """Every gauge and counter of :class:`~aioinfer.EngineStats`, and the shares of the process in the
        memory."""
        memory = await asyncio.to_thread(LEDGER.entries)  # looks at the pages of pools
        shares = {name: dataclasses.asdict(entry) for name, entry in memory.items()}
        return _json({**dataclasses.asdict(self._engine.stats()), "memory": shares})

    async def pause(self, request: web.Request) -> web.StreamResponse:
        """Launch no more steps; answered when none is in flight."""
        await self._engine.pause()
        return self._state()

    async def resume(self, request: web.Request) -> web.StreamResponse:
        self._engine.resume()
        return self._state()

    async def flush(self, request: web.Request) -> web.StreamResponse:
        """Forget cached prefixes."""
        return _json({"freed_pages": self._engine.flush_cache()})

    async def abort(self, request: web.Request) -> web.StreamResponse:
        """End the open requests of one id."""
        body = await _body(request, AbortBody)
        return _json({"aborted": self._engine.abort(body.request_id)})

    async def load_adapter(self, request: web.Request) -> web.StreamResponse:
        """As the server's own route."""
        return web.Response(text=await self._adapters.load(await _body(request, LoadBody)))

    async def unload_adapter(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=await self._adapters.unload(await _body(request, UnloadBody)))

    async def update_weights(self, request: web.Request) -> web.StreamResponse:
        """Load the checkpoint ``path`` in ``weights_root`` in place of the weights; answered when it
        computes."""
        body = await _body(request, UpdateBody)
        within = Confined(self._config.weights_root or "", "weights_root", "path")
        path = await asyncio.to_thread(within.whole, body.path)
        try:
            version = await self._engine.update_weights(path, mode=body.mode, version=body.version)
        except ConfigError as error:
            field, _, message = within.said(error).partition(": ")
            raise InvalidRequest({"weights": "path"}.get(field, field), message) from error
        except OutOfMemory as error:
            raise InvalidRequest("path", f"there is no memory for it: {error}") from error
        return _json({"weight_version": version})

    async def drain(self, request: web.Request) -> web.StreamResponse:
        """Accept nothing more; answered when the open requests have ended, after ``timeout`` seconds at most.
        The engine is closed then, for good; the process waits for its signal."""
        body = await _body(request, DrainBody)
        timeout = self._config.drain_timeout if body.timeout is None else body.timeout
        self._engine.resume()  # a paused engine would never get done
        await self._engine.aclose(drain=True, timeout=timeout)
        return self._state()

    async def trace(self, request: web.Request) -> web.StreamResponse:
        """The timeline as a Chrome trace: what is kept of the past, and what comes in ``seconds``."""
        given = request.query.get("seconds")
        try:
            seconds = 0.0 if given is None else float(given)
        except ValueError:
            raise InvalidRequest("seconds", "must be a number") from None
        if not 0 <= seconds <= _LONGEST_TRACE:
            raise InvalidRequest("seconds", f"must be from 0 to {_LONGEST_TRACE:g}")
        await asyncio.sleep(seconds)
        return await send_trace(request, self._engine, self._config.send_timeout)

    async def log_level(self, request: web.Request) -> web.StreamResponse:
        level = logging.getLogger("aioinfer").getEffectiveLevel()
        return _json({"level": logging.getLevelName(level).lower()})

    async def set_log_level(self, request: web.Request) -> web.StreamResponse:
        """Set the level of the loggers of this package."""
        body = await _body(request, LevelBody)
        logging.getLogger("aioinfer").setLevel(body.level.upper())
        return await self.log_level(request)

    def _state(self) -> web.StreamResponse:
        engine = self._engine
        return _json({"state": engine.state.value, "paused": engine.stats().paused})


def _guard(config: ServerConfig) -> Middleware:
    """Checks origin, host and key, reads the body in time, and turns exceptions into error objects."""
    keys = Keys.single("admin_key", config.admin_key)

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if "Origin" in request.headers:
                raise _forbidden("admin routes are not for web pages")
            for value in request.headers.getall("Host", ()):
                if not is_loopback(host_name(value)):
                    raise _forbidden(f"the host {value[:200]!r} is not a name of loopback")
            keys.check(request)
            async with asyncio.timeout(config.body_timeout):
                await request.read()
        except TimeoutError:
            message = f"the body did not arrive within {config.body_timeout:g} s"
            return Failure(408, "invalid_request_error", message, close=True).response()
        except Exception as error:
            return as_failure(error).response()
        try:
            return await handler(request)
        except Exception as error:
            return as_failure(error).response()

    return guarded


def _forbidden(message: str) -> Refused:
    return Refused(Failure(403, "permission_error", message))


def _json(body: dict[str, Any]) -> web.Response:
    return web.json_response(body)


async def _body(request: web.Request, kind: type[_ObjectT]) -> _ObjectT:
    """The JSON object of a body; empty without one. Raises InvalidRequest."""
    return admit(kind, json_object(await request.read() or b"{}"))
