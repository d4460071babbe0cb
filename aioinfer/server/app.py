"""The aiohttp application, and a server that runs it."""

from __future__ import annotations

import asyncio
import os
import posixpath
import socket
from collections.abc import AsyncIterator, Callable, Container, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aioinfer.client.engine_like import EngineLike
from aioinfer.config import ServerConfig, given_server
from aioinfer.config.values import shown
from aioinfer.engine import EngineState
from aioinfer.errors import ConfigError
from aioinfer.server.admin import ADMIN_HOST, admin_application
from aioinfer.server.asgi import AsgiApplication
from aioinfer.server.http.access import WebAccess
from aioinfer.server.http.connections import SURPLUS, Connection, Connections
from aioinfer.server.http.failures import as_failure
from aioinfer.server.http.keys import Keys
from aioinfer.server.http.limits import IMAGES_BODY_MIB
from aioinfer.server.http.listening import Bound, bind_all, connection_limit, listen
from aioinfer.server.http.logs import ACCESS, HTTP, AccessLog
from aioinfer.server.http.records import add_headers, record_of, recorded
from aioinfer.server.playground import PAGE
from aioinfer.server.routes import Routes
from aioinfer.server.status import HEALTH, OPEN_PATHS

__all__ = ["asgi_app", "create_app", "serve", "setup"]

_MIB = 1 << 20
#: connections to the admin routes
_ADMIN_CONNECTIONS = 16


def setup(
    app: web.Application,
    engine: EngineLike,
    prefix: str = "/v1",
    *,
    health: str | None = "../health",
    playground: str | None = None,
    config: ServerConfig | None = None,
) -> None:
    """Add the routes of an engine under ``prefix``, and a health route, to an application.

    ``health`` is an absolute path or relative to the prefix; None: no such route, no trace and no feed of
    steps. ``playground`` is the absolute path of a page to try the model with; None: no page, also if
    the config has one. An application can have several engines under different prefixes.

    An engine that is not started is started and closed together with the application. When the application
    shuts down, open requests have ``config.drain_timeout`` seconds to finish, and new ones get 503.
    Disconnects are detected within a second, even if the application's runner does not cancel handlers. The
    application's ``client_max_size`` bounds request bodies.

    Raises ConfigError: the prefix or ``playground`` is not a path, or the application already has one of the
    routes.
    """
    _drained(app, _mount(app, engine, prefix, health, given_server(config), playground=playground))


def create_app(engine: EngineLike, config: ServerConfig | None = None) -> web.Application:
    """A new application: the routes, checks of Host and Origin, and OpenAI's error objects for every other
    path. It starts, drains and closes the engine as :func:`setup` says."""
    return _whole_application(engine, given_server(config))


def asgi_app(engine: EngineLike, config: ServerConfig | None = None) -> AsgiApplication:
    """The application of :func:`create_app` for ASGI servers and frameworks: the same routes, checks and
    answers.

    ::

        app = FastAPI(lifespan=...)  # async with engine: yield
        app.mount("/llm", asgi_app(engine))

    A server that runs it alone (uvicorn, hypercorn) starts an engine that is not started, and drains and
    closes it. Where it is mounted, the application around it starts the engine: servers run the lifespan of
    the outermost one only. A client that disconnects is noticed at once. What says where to listen, and how
    many connections there may be, is the server's. Needs asyncio or uvloop.

    Raises ConfigError if it cannot read the file of keys.
    """
    config = given_server(config)
    logged = [AccessLog.of_cancelled(config.access_log_format)] if config.access_log else []
    return AsgiApplication(engine, config, partial(_whole_application, engine, config, *logged))


async def serve(
    engine: EngineLike,
    config: ServerConfig | None = None,
    *,
    stop: asyncio.Event | None = None,
    ready: Callable[[str], None] | None = None,
    sockets: Sequence[socket.socket] | Bound | None = None,
) -> None:
    """Serve until ``stop`` is set, then drain; cancellation ends it without draining.

    While it drains, the server responds to new requests with 503, and running requests have
    ``config.drain_timeout`` seconds to finish. ``ready`` is called with the base URL when requests are
    accepted. ``sockets``: bound TCP sockets to listen on, instead of the config's host and port, or what
    :func:`~aioinfer.server.http.listening.bind_all` returned; they are closed at the end. Installs no signal
    handler.

    Raises ConfigError if it cannot listen, or cannot read the files of keys or TLS.
    """
    config = given_server(config)
    stop = stop or asyncio.Event()
    bound = sockets if isinstance(sockets, Bound) else await bind_all(config, sockets)
    try:
        await _serve(engine, config, stop, ready, bound)
    finally:
        bound.close()


async def _serve(
    engine: EngineLike,
    config: ServerConfig,
    stop: asyncio.Event,
    ready: Callable[[str], None] | None,
    bound: Bound,
) -> None:
    others = _ADMIN_CONNECTIONS + SURPLUS if bound.admin else 0
    connections = _connections(config, connection_limit(config.max_connections, others), OPEN_PATHS)
    operators = _connections(config, _ADMIN_CONNECTIONS)
    logged = [AccessLog.of_cancelled(config.access_log_format)] if config.access_log else []
    app = _application(config, *logged, connections.middleware)
    _mount_whole(app, engine, config)
    runner = _runner(app, config)
    admin = _runner(admin_application(engine, config, operators.middleware), config)
    async with AsyncExitStack() as closing:  # the last one goes first, also if others raise
        closing.callback(connections.stop)
        closing.callback(operators.stop)
        closing.push_async_callback(admin.cleanup)
        closing.push_async_callback(runner.cleanup)
        await runner.setup()
        await admin.setup()
        assert runner.server is not None
        assert admin.server is not None
        public = partial(Connection, connections, runner.server, **_handling(config))
        for each in bound.public:
            server = await listen(public, each, config.host, tls=bound.tls, handshake=config.header_timeout)
            closing.callback(server.close)
        private = partial(Connection, operators, admin.server, **_handling(config))
        for each in bound.admin:
            closing.callback((await listen(private, each, ADMIN_HOST)).close)
        if ready is not None:
            ready(_url(bound, config))
        await stop.wait()
        await engine.aclose(drain=True, timeout=config.drain_timeout)


def _connections(config: ServerConfig, limit: int, unlimited: Container[str] = ()) -> Connections:
    times = {"header_timeout": config.header_timeout, "send_timeout": config.send_timeout}
    return Connections(limit=limit, unlimited=unlimited, **times)


def _runner(app: web.Application, config: ServerConfig) -> web.AppRunner:
    return web.AppRunner(app, handler_cancellation=True, shutdown_timeout=2.0, **_handling(config))


def _handling(config: ServerConfig) -> dict[str, Any]:
    """Options of connections."""
    return {
        "auto_decompress": False,  # bodies are decompressed in slices
        "access_log": ACCESS if config.access_log else None,
        "access_log_class": AccessLog,
        "access_log_format": config.access_log_format,
        "keepalive_timeout": config.idle_timeout,
        "logger": HTTP,
    }


def _url(bound: Bound, config: ServerConfig) -> str:
    first = bound.public[0]
    address = first.getsockname()
    if isinstance(address, (str, bytes)):
        return f"unix:{os.fsdecode(address)}"
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'http' if bound.tls is None else 'https'}://{host}:{address[1]}"


# -- an engine in an application -----------------------------------------------------------------------


class _Mount:
    """The life of an engine in an application: started and closed with it if it was not started before."""

    def __init__(self, engine: EngineLike, drain_timeout: float) -> None:
        self._engine = engine
        self._drain_timeout = drain_timeout
        self._ours = False

    async def context(self, app: web.Application) -> AsyncIterator[None]:
        self._ours = self._engine.state in (EngineState.NEW, EngineState.CLOSED)
        if self._ours:
            await self._engine.start()
        yield
        if self._ours:
            await self._engine.aclose()

    async def drain(self) -> None:
        if self._ours:
            await self._engine.aclose(drain=True, timeout=self._drain_timeout)


#: the engines that the application drains when it shuts down
_DRAINED = web.AppKey("aioinfer.drained", list[_Mount])


def _drained(app: web.Application, mount: _Mount) -> None:
    """Drain the engine when the application shuts down."""
    if _DRAINED not in app:
        app[_DRAINED] = []
        app.on_shutdown.append(_drain)
    app[_DRAINED].append(mount)


async def _drain(app: web.Application) -> None:
    async with asyncio.TaskGroup() as group:
        for mount in app[_DRAINED]:
            group.create_task(mount.drain())


def _mount(
    app: web.Application,
    engine: EngineLike,
    prefix: str,
    health: str | None,
    config: ServerConfig,
    *,
    whole: bool = False,
    playground: str | None = None,
) -> _Mount:
    if not isinstance(prefix, str):
        raise ConfigError(f"prefix must be a path, got {shown(prefix)}; settings are passed as config=...")
    prefix = prefix.rstrip("/")
    if prefix and not prefix.startswith("/"):
        raise ConfigError(f"prefix must begin with /, got {prefix!r}")
    if playground is not None and not playground.startswith("/"):
        raise ConfigError(f"playground must begin with /, got {playground!r}")
    if health is not None:
        health = posixpath.normpath(posixpath.join(prefix or "/", health))
    routes = Routes(engine, config, Keys.of(config))
    routes.add_to(app, prefix, health, whole=whole, playground=playground)
    if add_headers not in app.on_response_prepare:
        app.on_response_prepare.append(add_headers)
    mount = _Mount(engine, config.drain_timeout)
    app.cleanup_ctx.append(mount.context)
    return mount


def _whole_application(engine: EngineLike, config: ServerConfig, *outer: Middleware) -> web.Application:
    """A server's application, which drains its engine itself."""
    app = _application(config, *outer)
    _drained(app, _mount_whole(app, engine, config))
    return app


def _mount_whole(app: web.Application, engine: EngineLike, config: ServerConfig) -> _Mount:
    """The engine of a server of its own, with all its routes."""
    playground = PAGE.path if config.playground else None
    return _mount(app, engine, "/v1", HEALTH.path, config, whole=True, playground=playground)


def _application(config: ServerConfig, *outer: Middleware) -> web.Application:
    access = WebAccess(config)
    app = web.Application(
        middlewares=[recorded, *outer, _json_errors, access.middleware(OPEN_PATHS)],
        client_max_size=int((config.max_body_mib or IMAGES_BODY_MIB) * _MIB),
    )
    app.on_response_prepare.append(_recorded_early)
    app.on_response_prepare.append(add_headers)
    app.on_response_prepare.append(access.add_headers)
    return app


async def _recorded_early(request: web.Request, response: web.StreamResponse) -> None:
    """Responses to ``Expect`` come before all middlewares."""
    record_of(request)


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors outside the routes' handlers, like 403, 404 and 405, to OpenAI's error objects."""
    try:
        return await handler(request)
    except Exception as error:
        return as_failure(error).response()
