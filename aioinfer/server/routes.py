"""Routes: the endpoints over one engine."""

from __future__ import annotations

from aiohttp import web

from aioinfer.config import ServerConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError
from aioinfer.observe.tracing import within
from aioinfer.server.generation import Generation
from aioinfer.server.http.access import ApiKey
from aioinfer.server.http.bodies import expected
from aioinfer.server.http.disconnects import ClientGone, is_gone
from aioinfer.server.http.failures import as_failure
from aioinfer.server.openai.wires import CHAT_ENDPOINT, CHAT_WIRE, COMPLETION_ENDPOINT, COMPLETION_WIRE
from aioinfer.server.openapi.endpoints import Endpoint, Handler, Route
from aioinfer.server.openapi.pages import Pages
from aioinfer.server.operations.metrics import METRICS, Metrics
from aioinfer.server.status import HEALTH, TRACE, Status
from aioinfer.server.tokens import Tokens
from aioinfer.server.wire import Wire

__all__ = ["Routes"]

#: nginx's status of a closed connection, for the access log
_CLIENT_GONE = 499


class Routes:
    """The endpoints and their handlers; added to an application by :func:`aioinfer.server.setup`."""

    def __init__(self, engine: Engine, config: ServerConfig) -> None:
        model = config.served_model_name or engine.config.model_name
        self._engine = engine
        self._metrics = Metrics(engine, config, model) if config.metrics else None
        self._generation = Generation(engine, config, model, self._metrics)
        self._key = ApiKey(config.api_key)
        self._status = Status(engine, config, model)
        self._tokens = Tokens(engine, config, self._generation)
        self._pages = Pages(keyed=self._key.given)

    def _routes(self) -> list[Route]:
        """Every endpoint but health and trace, whose path an application chooses."""
        return [
            CHAT_ENDPOINT.route(self._generating(CHAT_WIRE)),
            COMPLETION_ENDPOINT.route(self._generating(COMPLETION_WIRE)),
            *self._tokens.routes(),
            *self._status.routes(),
            *self._pages.routes(),
        ]

    def add_to(self, app: web.Application, prefix: str, health: str | None, *, whole: bool) -> None:
        """Add the routes to an application. ``whole``: it is a server of this engine, and has the routes at
        its root, too. Raises ConfigError if the application has one of the routes."""
        begin = {"prefix": prefix, "here": "" if whole else prefix, "root": ""}
        routes = [
            (f"{begin[endpoint.place]}{endpoint.path}", endpoint, handler)
            for endpoint, handler in self._routes()
            if whole or endpoint.place != "root"
        ]
        if health is not None:
            beside = health.rsplit("/", 1)[0]
            routes.append((health, HEALTH, self._status.health))
            routes.append((beside + TRACE.path, TRACE, self._status.trace))
            if self._metrics is not None:
                routes.append((beside + METRICS.path, METRICS, self._metrics.scrape))
        taken = {
            (method, route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None
            for method in (("GET", "POST") if route.method == "*" else (route.method,))
        }
        for path, endpoint, _ in routes:
            if (endpoint.method, path) in taken:
                without = ", or metrics=False" if endpoint is METRICS else ""
                raise ConfigError(
                    f"the application already has the route {path}: choose another prefix or health path"
                    + without
                )
        for path, endpoint, handler in routes:
            add = app.router.add_get if endpoint.method == "GET" else app.router.add_post
            add(path, self._guarded(endpoint, handler), expect_handler=expected)
        self._pages.show([(path, endpoint) for path, endpoint, _ in routes])

    def _generating(self, wire: Wire) -> Handler:
        async def generate(request: web.Request) -> web.StreamResponse:
            return await self._generation.respond(request, wire)

        return generate

    # -- around every handler -------------------------------------------------------------------

    def _guarded(self, endpoint: Endpoint, handler: Handler) -> Handler:
        """Check the key; turn exceptions into OpenAI's error objects."""

        async def guarded(request: web.Request) -> web.StreamResponse:
            try:
                if not endpoint.open:
                    self._key.check(request)
                if not self._engine.config.tracing:
                    return await handler(request)
                with within(request.headers):
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
