"""The aiohttp application, and a server that runs it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from aioinfer.config import ServerConfig
from aioinfer.engine import Engine, EngineState
from aioinfer.server.failures import as_failure
from aioinfer.server.limits import MOST_BODY_MIB
from aioinfer.server.routes import Routes

__all__ = ["ENGINE", "create_app", "serve", "setup"]

#: key of an application's engine
ENGINE = web.AppKey("aioinfer.engine", Engine)

_MIB = 1 << 20


def setup(
    app: web.Application,
    engine: Engine,
    prefix: str = "/v1",
    *,
    health: str | None = "/health",
    config: ServerConfig | None = None,
) -> None:
    """Add the OpenAI routes under ``prefix``, and a health route, to an application.

    An engine that is not started is started and closed together with the application. Disconnects are
    detected within a second, even if the application's runner does not cancel handlers. The application's
    ``client_max_size`` bounds request bodies.
    """
    app[ENGINE] = engine
    Routes(engine, config or ServerConfig()).add_to(app, prefix.rstrip("/"), health)
    app.cleanup_ctx.append(_engine_context)


def create_app(engine: Engine, config: ServerConfig | None = None) -> web.Application:
    """A new application: the routes, and OpenAI's error objects for every other path."""
    config = config or ServerConfig()
    most = int((config.max_body_mib or MOST_BODY_MIB) * _MIB)
    app = web.Application(middlewares=[_json_errors], client_max_size=most)
    setup(app, engine, config=config)
    return app


async def serve(
    engine: Engine,
    config: ServerConfig | None = None,
    *,
    stop: asyncio.Event | None = None,
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve until ``stop`` is set, then drain; cancellation ends it without draining.

    While it drains, the server responds to new requests with 503, and running requests have
    ``config.drain_timeout`` seconds to finish. ``ready`` is called with the base URL when requests are
    accepted. Installs no signal handler.
    """
    config = config or ServerConfig()
    stop = stop or asyncio.Event()
    runner = web.AppRunner(
        create_app(engine, config),
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=2.0,
        auto_decompress=False,  # bodies are decompressed in slices
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port)
        await site.start()
        if ready is not None:
            ready(_url(runner, config))
        await stop.wait()
        await engine.aclose(drain=True, timeout=config.drain_timeout)
    finally:
        await runner.cleanup()


def _url(runner: web.AppRunner, config: ServerConfig) -> str:
    port = runner.addresses[0][1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{port}"


async def _engine_context(app: web.Application) -> AsyncIterator[None]:
    engine = app[ENGINE]
    ours = engine.state in (EngineState.NEW, EngineState.CLOSED)
    if ours:
        await engine.start()
    yield
    if ours:
        await engine.aclose()


@web.middleware
async def _json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Convert 404, 405 and 413 to OpenAI's error objects."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        return as_failure(error).response()
