"""Routes: the endpoints of OpenAI's and Anthropic's protocols over one engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aiohttp import web

from aioinfer.client.engine_like import EngineLike
from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError
from aioinfer.observe.tracing import within
from aioinfer.server.adapters import AdapterRoutes
from aioinfer.server.anthropic.endpoints import COUNT_ENDPOINT, MESSAGES_ENDPOINT
from aioinfer.server.anthropic.parsing import parse_count
from aioinfer.server.anthropic.wires import MESSAGES_WIRE
from aioinfer.server.generation import Generation
from aioinfer.server.http.bodies import expected
from aioinfer.server.http.disconnects import ClientGone, is_gone
from aioinfer.server.http.failures import as_failure
from aioinfer.server.http.keys import Keys
from aioinfer.server.http.logs import CLIENT_GONE
from aioinfer.server.http.pace import Arrivals
from aioinfer.server.http.records import record_of
from aioinfer.server.openai.wires import CHAT_ENDPOINT, CHAT_WIRE, COMPLETION_ENDPOINT, COMPLETION_WIRE
from aioinfer.server.openapi.endpoints import Handler, Route
from aioinfer.server.openapi.pages import Pages
from aioinfer.server.operations.metrics import METRICS, Metrics
from aioinfer.server.playground import PAGE, playground_page
from aioinfer.server.pooling import PoolingRoutes
from aioinfer.server.responses.endpoints import RESPONSES_ENDPOINT
from aioinfer.server.responses.routes import StoredRoutes
from aioinfer.server.responses.stored import StoredResponses
from aioinfer.server.responses.wires import RESPONSES_WIRE
from aioinfer.server.sessions.routes import SessionRoutes
from aioinfer.server.sessions.table import Sessions
from aioinfer.server.status import HEALTH, TRACE, Status
from aioinfer.server.tokens import Tokens
from aioinfer.server.watching import STEPS, Watching
from aioinfer.server.wire import Wire

__all__ = ["Routes"]

#: what else helps if an application has the route of an endpoint already
_WITHOUT = {METRICS.path: ", or metrics=False", PAGE.path: ", or another path for the playground, or none"}


class Routes:
    """The endpoints and their handlers; added to an application by :func:`aioinfer.server.setup`."""

    def __init__(self, engine: EngineLike, config: ServerConfig, keys: Keys) -> None:
        models = config.model_names or (engine.config.model_name,)
        self._engine = engine
        self._config = config
        self._keys = keys
        self._metrics = Metrics(engine, config, models[0], keys) if config.metrics else None
        self._stored = StoredResponses(config)
        self._sessions = Sessions(config)
        self._generation = Generation(engine, config, models, self._stored, self._sessions, self._metrics)
        self._session_routes = SessionRoutes(engine, config, models[0], self._sessions, self._generation)
        self._status = Status(engine, config, models, keys)
        self._tokens = Tokens(engine, config, self._generation)
        self._adapters = AdapterRoutes(engine, config, models, self._generation)
        self._pooling = PoolingRoutes(engine, config, self._generation)
        self._pages = Pages(keyed=keys.given)
        self._watching = Watching(engine, config, keys)
        self._arrivals = Arrivals()

    def _routes(self) -> list[Route]:
        """Every endpoint but health and trace, whose path an application chooses."""
        return [
            CHAT_ENDPOINT.route(self._generating(CHAT_WIRE)),
            COMPLETION_ENDPOINT.route(self._generating(COMPLETION_WIRE)),
            RESPONSES_ENDPOINT.route(self._generating(RESPONSES_WIRE)),
            *StoredRoutes(self._config, self._stored).routes(),
            *self._session_routes.routes(),
            MESSAGES_ENDPOINT.route(self._generating(MESSAGES_WIRE)),
            COUNT_ENDPOINT.route(self._count_tokens),
            *self._pooling.routes(),
            *self._tokens.routes(),
            *self._status.routes(),
            *self._adapters.routes(),
            *self._pages.routes(),
        ]

    def add_to(
        self, app: web.Application, prefix: str, health: str | None, *, whole: bool, playground: str | None
    ) -> None:
        """Add the routes to an application. ``whole``: it is a server of this engine, and has the routes at
        its root, too. ``playground``: the path of that page, or None. Raises ConfigError if the application
        has one of the routes."""
        begin = {"prefix": prefix, "here": "" if whole else prefix, "root": ""}
        routes = [
            (f"{begin[route.endpoint.place]}{route.endpoint.path}", route)
            for route in self._routes()
            if whole or route.endpoint.place != "root"
        ]
        steps = None
        if health is not None:
            beside = health.rsplit("/", 1)[0]
            steps = beside + STEPS.path
            routes.append((health, HEALTH.route(self._status.health)))
            routes.append((beside + TRACE.path, TRACE.route(self._status.trace)))
            routes.append((steps, STEPS.route(self._watching.respond)))
            if self._metrics is not None:
                routes.append((beside + METRICS.path, METRICS.route(self._metrics.scrape)))
        if playground is not None:
            routes.append((playground, PAGE.route(playground_page(playground, prefix, steps))))
        self._add(app, routes)
        app.on_shutdown.append(self._watching.close)
        app.on_cleanup.append(self._forget)
        self._pages.show([(path, route.endpoint) for path, route in routes])

    async def _forget(self, app: web.Application) -> None:
        self._stored.clear()
        self._sessions.clear()
        await self._generation.close()

    def _add(self, app: web.Application, routes: Sequence[tuple[str, Route]]) -> None:
        taken = {
            (method, route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None
            for method in (("GET", "POST", "DELETE") if route.method == "*" else (route.method,))
        }
        for path, route in routes:
            if (route.endpoint.method, path) in taken:
                without = _WITHOUT.get(route.endpoint.path, "")
                raise ConfigError(
                    f"the application already has the route {path}: choose another prefix or health path"
                    + without
                )
        for path, route in routes:
            router = app.router
            adding = {"GET": router.add_get, "POST": router.add_post, "DELETE": router.add_delete}
            add = adding[route.endpoint.method]
            add(path, self._guarded(route), expect_handler=expected)

    def _generating(self, wire: Wire) -> Handler:
        async def generate(request: web.Request) -> web.StreamResponse:
            return await self._generation.respond(request, wire)

        return generate

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        count = await self._generation.count(request, parse_count)
        return web.json_response({"input_tokens": count})

    # -- around every handler -------------------------------------------------------------------

    def _guarded(self, route: Route) -> Handler:
        """Await its turn among arrivals, check the key, turn exceptions into the endpoint's errors."""
        endpoint, handler = route

        async def guarded(request: web.Request) -> web.StreamResponse:
            record = record_of(request)
            try:
                if not endpoint.open:
                    await self._arrivals()
                    if is_gone(request):
                        raise ClientGone("the client has closed its connection")
                    record.key = self._keys.check(request)
                if not self._engine.config.tracing:
                    return await handler(request)
                with within(request.headers, record.id):
                    return await handler(request)
            except ClientGone:
                return web.Response(status=CLIENT_GONE)
            except Exception as error:
                if isinstance(error, ConnectionError) and is_gone(request):
                    return web.Response(status=CLIENT_GONE)
                failure = replace(as_failure(error), request_id=record.id)
                response = failure.response(None if endpoint.error is None else endpoint.error.made(failure))
                if request.content.exception() is not None:
                    # The rest of the body is lost. aiohttp would read it, and log an error of its own.
                    request.content.feed_eof()
                    response.force_close()
                return response

        return guarded
