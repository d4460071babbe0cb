"""Routes: OpenAI's endpoints over one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from aioinfer.config import ServerConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError
from aioinfer.server.generation import Generation
from aioinfer.server.http.access import ApiKey, WebAccess
from aioinfer.server.http.bodies import expected
from aioinfer.server.http.disconnects import ClientGone, is_gone
from aioinfer.server.http.failures import as_failure
from aioinfer.server.openai.protocol import model_not_found, parse_chat, parse_completion
from aioinfer.server.openai.shapes import CHAT, COMPLETION
from aioinfer.server.playground.page import Page
from aioinfer.server.watching import Watching

__all__ = ["Routes"]

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
#: nginx's status of a closed connection, for the access log
_CLIENT_GONE = 499


class Routes:
    """The handlers; added to an application by :func:`aioinfer.server.setup`."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        self._engine = engine
        self._config = config
        self._model = config.served_model_name or engine.config.model_name
        self._generation = Generation(engine, config, self._model)
        self._key = ApiKey(config.api_key)
        self._access = WebAccess(config)
        self._watching = Watching(engine, config)

    def add_to(
        self, app: web.Application, prefix: str, health: str | None, playground: str | None = None
    ) -> None:
        """Raises ConfigError if the application has one of the routes."""
        routes: list[tuple[str, str, _Handler]] = [
            ("POST", f"{prefix}/chat/completions", self._guarded(self.chat)),
            ("POST", f"{prefix}/completions", self._guarded(self.completions)),
            ("GET", f"{prefix}/models", self._guarded(self.models)),
            ("GET", f"{prefix}/models/{{model}}", self._guarded(self.model)),
        ]
        if health is not None:
            debug = health.rsplit("/", 1)[0] + "/debug"
            routes.append(("GET", health, self.health))
            routes.append(("GET", f"{debug}/trace", self._guarded(self.trace)))
            routes.append(("GET", f"{debug}/steps", self._guarded(self.steps)))
            app.on_shutdown.append(self._watching.close)
        if playground is not None:
            page = Page(playground, prefix, None if health is None else f"{debug}/steps")
            routes.extend(("GET", path, page.get) for path in page.paths)
        taken = {
            (method, route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None
            for method in (("GET", "POST") if route.method == "*" else (route.method,))
        }
        for method, path, _ in routes:
            if (method, path) in taken:
                raise ConfigError(
                    f"the application already has the route {path}: choose another prefix or health path"
                )
        for method, path, handler in routes:
            add = app.router.add_get if method == "GET" else app.router.add_post
            add(path, handler, expect_handler=expected)

    # -- endpoints ------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generation.respond(request, parse_chat, CHAT)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generation.respond(request, parse_completion, COMPLETION)

    async def models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"object": "list", "data": [self._model_body()]})

    async def model(self, request: web.Request) -> web.StreamResponse:
        if request.match_info["model"] != self._model:
            raise model_not_found(self._model, request.match_info["model"])
        return web.json_response(self._model_body())

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 while requests are accepted and steps finish, 503 otherwise."""
        status = self._engine.state.value
        if self._engine.ready:
            stalled = self._engine.stats().stalled > self._config.stall_timeout
            status = "stalled" if stalled else "ok"
        return web.json_response({"status": status}, status=200 if status == "ok" else 503)

    async def trace(self, request: web.Request) -> web.StreamResponse:
        """The latest steps as a Chrome trace, for Perfetto or chrome://tracing."""
        self._check_local(request)
        trace = await asyncio.to_thread(self._engine.timeline.chrome_trace)
        return web.Response(text=trace, content_type="application/json")

    async def steps(self, request: web.Request) -> web.StreamResponse:
        """Steps and gauges as they happen, as server-sent events."""
        self._check_local(request)
        return await self._watching.respond(request)

    def _check_local(self, request: web.Request) -> None:
        if not self._key.given:
            self._access.check_local(request)

    def _model_body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"id": self._model, "object": "model", "created": 0, "owned_by": "aioinfer"}
        if self._engine.ready:
            info = self._engine.info
            body["max_model_len"] = info.max_model_len
            if info.block_size is not None:
                body["block_size"] = info.block_size
        return body

    # -- around every handler -------------------------------------------------------------------

    def _guarded(self, handler: _Handler) -> _Handler:
        """Check the key; turn exceptions into OpenAI's error objects."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                self._key.check(request)
                return await handler(request)
            except ClientGone:
                return web.Response(status=_CLIENT_GONE)
            except Exception as error:
                if isinstance(error, ConnectionError) and is_gone(request):
                    return web.Response(status=_CLIENT_GONE)
                response = as_failure(error).response()
                if request.content.exception() is not None:
                    # The rest of the body is lost. aiohttp would read it, and log an error of its own.
                    request.content.feed_eof()
                    response.force_close()
                return response

        return guarded
