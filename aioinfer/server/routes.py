"""Routes: the endpoints of OpenAI's and Anthropic's protocols over one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from aioinfer.config import ServerConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError
from aioinfer.server.anthropic.parsing import parse_count
from aioinfer.server.anthropic.wires import MESSAGES_WIRE
from aioinfer.server.generation import Generation
from aioinfer.server.http.access import ApiKey, WebAccess
from aioinfer.server.http.bodies import expected
from aioinfer.server.http.disconnects import ClientGone, is_gone
from aioinfer.server.http.failures import as_failure
from aioinfer.server.openai.protocol import model_not_found
from aioinfer.server.openai.wires import CHAT_WIRE, COMPLETION_WIRE
from aioinfer.server.responses.wires import RESPONSES_WIRE
from aioinfer.server.wire import Wire

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

    def add_to(self, app: web.Application, prefix: str, health: str | None) -> None:
        """Raises ConfigError if the application has one of the routes."""
        routes: list[tuple[str, str, _Handler]] = [
            ("POST", f"{prefix}/chat/completions", self._guarded(self.chat)),
            ("POST", f"{prefix}/completions", self._guarded(self.completions)),
            ("POST", f"{prefix}/responses", self._guarded(self.responses)),
            ("POST", f"{prefix}/messages", self._guarded(self.messages, MESSAGES_WIRE)),
            ("POST", f"{prefix}/messages/count_tokens", self._guarded(self.count_tokens, MESSAGES_WIRE)),
            ("GET", f"{prefix}/models", self._guarded(self.models)),
            ("GET", f"{prefix}/models/{{model}}", self._guarded(self.model)),
        ]
        if health is not None:
            routes.append(("GET", health, self.health))
            routes.append(("GET", health.rsplit("/", 1)[0] + "/debug/trace", self._guarded(self.trace)))
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
        return await self._generation.respond(request, CHAT_WIRE)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generation.respond(request, COMPLETION_WIRE)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        return await self._generation.respond(request, RESPONSES_WIRE)

    async def messages(self, request: web.Request) -> web.StreamResponse:
        return await self._generation.respond(request, MESSAGES_WIRE)

    async def count_tokens(self, request: web.Request) -> web.StreamResponse:
        """Of a body as that of :meth:`messages`, without generating."""
        count = await self._generation.count(request, parse_count)
        return web.json_response({"input_tokens": count})

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
        if not self._key.given:
            self._access.check_local(request)
        trace = await asyncio.to_thread(self._engine.timeline.chrome_trace)
        return web.Response(text=trace, content_type="application/json")

    def _model_body(self) -> dict[str, Any]:
        body: dict[str, Any] = {"id": self._model, "object": "model", "created": 0, "owned_by": "aioinfer"}
        if self._engine.ready:
            body["max_model_len"] = self._engine.info.max_model_len
        return body

    # -- around every handler -------------------------------------------------------------------

    def _guarded(self, handler: _Handler, wire: Wire = CHAT_WIRE) -> _Handler:
        """Check the key; turn exceptions into the error objects of the protocol."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                self._key.check(request)
                return await handler(request)
            except ClientGone:
                return web.Response(status=_CLIENT_GONE)
            except Exception as error:
                if isinstance(error, ConnectionError) and is_gone(request):
                    return web.Response(status=_CLIENT_GONE)
                response = wire.failed(as_failure(error))
                if request.content.exception() is not None:
                    # The rest of the body is lost. aiohttp would read it, and log an error of its own.
                    request.content.feed_eof()
                    response.force_close()
                return response

        return guarded
