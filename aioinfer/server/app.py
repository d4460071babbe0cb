"""The aiohttp application, and a server that runs it."""

from __future__ import annotations

import asyncio
import posixpath
import socket
from collections.abc import AsyncIterator, Callable, Sequence

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from aioinfer.config import ServerConfig
from aioinfer.engine import Engine, EngineState
from aioinfer.errors import ConfigError
from aioinfer.server.http.access import WebAccess
from aioinfer.server.http.connections import Connections
from aioinfer.server.http.failures import as_failure
from aioinfer.server.http.limits import MOST_BODY_MIB
from aioinfer.server.http.listening import bind, cannot_listen, connection_limit
from aioinfer.server.http.logs import ACCESS, ACCESS_FORMAT, HTTP
from aioinfer.server.routes import Routes
from aioinfer.server.status import HEALTH, OPEN_PATHS

__all__ = ["create_app", "serve", "setup"]

_MIB = 1 << 20
#: connections that the system keeps until they are accepted
_BACKLOG = 1024
#: connections that asyncio's loop accepts in one turn, which it takes from its argument ``backlog``
_ACCEPTS = 16


def setup(
    app: web.Application,
    engine: Engine,
    prefix: str = "/v1",
    *,
    health: str | None = "../health",
    config: ServerConfig | None = None,
) -> None:
    """Add the routes of an engine under ``prefix``, and a health route, to an application.

    ``health`` is an absolute path or relative to the prefix; None: no such route and no trace. An application
    can have several engines under different prefixes.

    An engine that is not started is started and closed together with the application. When the application
    shuts down, open requests have ``config.drain_timeout`` seconds to finish, and new ones get 503.
    Disconnects are detected within a second, even if the application's runner does not cancel handlers. The
    application's ``client_max_size`` bounds request bodies.

    Raises ConfigError: the prefix is not a path, or the application already has one of the routes.
    """
    _drained(app, _mount(app, engine, prefix, health, config or ServerConfig()))


def create_app(engine: Engine, config: ServerConfig | None = None) -> web.Application:
    """A new application: the routes, checks of Host and Origin, and OpenAI's error objects for every other
    path. It starts, drains and closes the engine as :func:`setup` says."""
    config = config or ServerConfig()
    app = _application(config)
    _drained(app, _mount(app, engine, "/v1", HEALTH.path, config, whole=True))
    return app


async def serve(
    engine: Engine,
    config: ServerConfig | None = None,
    *,
    stop: asyncio.Event | None = None,
    ready: Callable[[str], None] | None = None,
    sockets: Sequence[socket.socket] | None = None,
) -> None:
    """Serve until ``stop`` is set, then drain; cancellation ends it without draining.

    While it drains, the server responds to new requests with 503, and running requests have
    ``config.drain_timeout`` seconds to finish. ``ready`` is called with the base URL when requests are
    accepted. ``sockets``: bound TCP sockets to listen on, instead of the config's host and port; they are
    closed at the end. Installs no signal handler.

    Raises ConfigError if it cannot listen.
    """
    config = config or ServerConfig()
    stop = stop or asyncio.Event()
    bound = list(sockets) if sockets is not None else await bind(config.host, config.port)
    try:
        await _serve(engine, config, stop, ready, bound)
    finally:
        for each in bound:
            each.close()


async def _serve(
    engine: Engine,
    config: ServerConfig,
    stop: asyncio.Event,
    ready: Callable[[str], None] | None,
    sockets: Sequence[socket.socket],
) -> None:
    connections = Connections(
        limit=connection_limit(config.max_connections),
        header_timeout=config.header_timeout,
        send_timeout=config.send_timeout,
        unlimited=OPEN_PATHS,
    )
    app = _application(config, connections.middleware)
    _mount(app, engine, "/v1", HEALTH.path, config, whole=True)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,  # bodies are decompressed in slices
        access_log=ACCESS if config.access_log else None,
        access_log_format=ACCESS_FORMAT,
        keepalive_timeout=config.idle_timeout,
        logger=HTTP,
        shutdown_timeout=2.0,
    )
    servers: list[asyncio.Server] = []
    try:
        await runner.setup()
        assert runner.server is not None
        connections.start(runner.server)
        for each in sockets:
            servers.append(await _listen(connections, each, config))
        if ready is not None:
            ready(_url(sockets[0], config))
        await stop.wait()
        await engine.aclose(drain=True, timeout=config.drain_timeout)
    finally:
        for server in servers:
            server.close()
        await runner.cleanup()
        connections.stop()


async def _listen(connections: Connections, bound: socket.socket, config: ServerConfig) -> asyncio.Server:
    try:
        # Another program may have begun to listen since the socket was bound. uvloop hangs on this error.
        bound.listen(_BACKLOG)
    except OSError as error:
        raise cannot_listen(error, config.host, bound.getsockname()[1]) from error
    server = await asyncio.get_running_loop().create_server(connections, sock=bound, backlog=_ACCEPTS)
    bound.listen(_BACKLOG)
    return server


def _url(bound: socket.socket, config: ServerConfig) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{bound.getsockname()[1]}"


# -- an engine in an application -----------------------------------------------------------------------


class _Mount:
    """The life of an engine in an application: started and closed with it if it was not started before."""

    def __init__(self, engine: Engine, drain_timeout: float) -> None:
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
    engine: Engine,
    prefix: str,
    health: str | None,
    config: ServerConfig,
    *,
    whole: bool = False,
) -> _Mount:
    prefix = prefix.rstrip("/")
    if prefix and not prefix.startswith("/"):
        raise ConfigError(f"prefix must begin with /, got {prefix!r}")
    if health is not None:
        health = posixpath.normpath(posixpath.join(prefix or "/", health))
    Routes(engine, config).add_to(app, prefix, health, whole=whole)
    mount = _Mount(engine, config.drain_timeout)
    app.cleanup_ctx.append(mount.context)
    return mount


def _application(config: ServerConfig, *outer: Middleware) -> web.Application:
    access = WebAccess(config)
    app = web.Application(
        middlewares=[*outer, _json_errors, _but_health(access.middleware)],
        client_max_size=int((config.max_body_mib or MOST_BODY_MIB) * _MIB),
    )
    app.on_response_prepare.append(access.add_headers)
    return app


def _but_health(middleware: Middleware) -> Middleware:
    """A middleware for every path but those that monitors ask by any name and without a key."""

    @web.middleware
    async def selective(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS:
            return await handler(request)
        return await middleware(request, handler)

    return selective


@web.middleware
async def _json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert errors outside the routes' handlers, like 403, 404 and 405, to OpenAI's error objects."""
    try:
        return await handler(request)
    except Exception as error:
        return as_failure(error).response()
