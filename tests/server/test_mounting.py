"""Engines in an application of one's own: several of them, conflicts, and what a shutdown leaves time for."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.engine import Engine, EngineState
from aioinfer.errors import ConfigError
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.server import asgi_app, create_app, setup
from tests.engine.conftest import Gate
from tests.server.calls import Http, Reply, http
from tests.server.test_adversity import ENDLESS, slow, until
from tests.tiers import SECONDS, rest
from tests.toys import ToyDevice, ToyTokenizer

BODY = {**ENDLESS, "max_tokens": 4}
BOTH = ("/a/v1", "/b/v1")


def make_engine(
    fault: Any = None, *, kind: type[Engine] = Engine, tokenizer: Any = None, **settings: Any
) -> Engine:
    config = EngineConfig(model="toy", page_size=4, num_pages=2048, **settings)

    def launcher(_: EngineConfig) -> ThreadLauncher:
        slots = {"num_slots": config.num_slots, "max_adapters": config.adapter_slots}
        return ThreadLauncher(ToyDevice(num_pages=2048, fault=fault, **slots))

    return kind(config, launcher=launcher, tokenizer=lambda _: tokenizer or ToyTokenizer())


@asynccontextmanager
async def running(app: web.Application) -> AsyncIterator[str]:
    """The base URL of an application that runs without cancelling handlers."""
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def application(app: web.Application) -> AsyncIterator[Http]:
    """A client of an application that runs."""
    async with running(app) as url, http(url) as client:
        yield client


async def complete(client: Http, prefix: str, **fields: Any) -> Reply:
    return await client.post(f"{prefix}/completions", {**BODY, **fields})


async def test_two_engines_are_mounted_started_and_closed() -> None:
    app = web.Application()
    engines = [make_engine(), make_engine()]
    for engine, prefix in zip(engines, BOTH, strict=True):
        setup(app, engine, prefix)
    async with application(app) as client:
        for engine, prefix in zip(engines, BOTH, strict=True):
            before = engine.stats().finished
            assert (await complete(client, prefix)).text.endswith("data: [DONE]\n\n")
            assert engine.stats().finished == before + 1
            for path in ("/health", "/debug/trace"):
                assert (await client.get(prefix.removesuffix("/v1") + path)).status == 200
    assert [engine.state for engine in engines] == [EngineState.CLOSED] * 2


async def test_an_engine_can_have_two_prefixes_and_may_be_started_already() -> None:
    engine = make_engine()
    app = web.Application()
    for prefix in BOTH:
        setup(app, engine, prefix)
    async with engine:
        async with application(app) as client:
            for prefix in BOTH:
                assert (await complete(client, prefix)).status == 200
        assert engine.ready, "the application closes only what it has started"


@rest(SECONDS)
@pytest.mark.parametrize("stream", [True, False])
async def test_disconnects_are_noticed_where_handlers_are_not_cancelled(stream: bool) -> None:
    engine, app = make_engine(slow), web.Application()
    setup(app, engine)
    async with application(app) as client:
        leaving = asyncio.create_task(complete(client, "/v1", max_tokens=4000, stream=stream))
        await until(lambda: engine.stats().running == 1)
        leaving.cancel()
        await asyncio.wait([leaving])
        await until(lambda: engine.stats().running == 0)


async def test_routes_of_any_method_exist_for_those_that_delete_too() -> None:
    async def own(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/v1/saved_sessions/{name}", own)
    with pytest.raises(ConfigError, match="already has the route /v1/saved_sessions"):
        setup(app, make_engine(), "/v1")


@pytest.mark.parametrize(
    ("prefix", "health", "path"),
    [
        ("/v1", "/other", "/v1/chat/completions"),
        ("/v1/", "/other", "/v1/chat/completions"),
        ("/b/v1", "/health", "/health"),
        ("/b/v1", "../../health", "/health"),
        ("/own", None, "/own/models"),
    ],
)
async def test_a_route_that_exists_already_is_an_error_and_adds_nothing(
    prefix: str, health: str | None, path: str
) -> None:
    async def own(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/own/models", own)
    setup(app, make_engine(), "/v1")
    before = len(app.router.routes()), len(app.cleanup_ctx), len(app.on_shutdown)
    with pytest.raises(ConfigError, match=f"already has the route {path}"):
        setup(app, make_engine(), prefix, health=health)
    assert (len(app.router.routes()), len(app.cleanup_ctx), len(app.on_shutdown)) == before


async def test_a_prefix_is_a_path() -> None:
    with pytest.raises(ConfigError, match="prefix must begin with /"):
        setup(web.Application(), make_engine(), "v1")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda engine: setup(web.Application(), engine, ServerConfig()), "config="),
        (lambda engine: setup(web.Application(), engine, config=EngineConfig()), "must be a ServerConfig"),
        (lambda engine: create_app(engine, "/v1"), "must be a ServerConfig"),
        (lambda engine: asgi_app(engine, "/v1"), "must be a ServerConfig"),
    ],
)
async def test_a_config_in_another_place_is_named(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call(make_engine())


async def test_a_config_is_taken_by_name_and_by_place() -> None:
    config = ServerConfig(metrics=False)
    for make in (create_app, asgi_app):
        make(make_engine(), config)
        make(make_engine(), config=config)


@pytest.mark.parametrize(
    ("prefix", "health", "path"),
    [
        ("/v1", "../health", "/health"),
        ("", "../health", "/health"),
        ("/llm/v1/", "../health", "/llm/health"),
        ("/llm/v1", "/ready", "/ready"),
        ("/llm/v1", "health", "/llm/v1/health"),
    ],
)
async def test_the_health_path_is_relative_to_the_prefix(prefix: str, health: str, path: str) -> None:
    app = web.Application()
    setup(app, make_engine(), prefix, health=health)
    assert path in {resource.canonical for resource in app.router.resources()}


@pytest.mark.parametrize("whole", [False, True])
async def test_a_shutdown_lets_streams_finish_and_refuses_new_requests(gate: Gate, whole: bool) -> None:
    engines = [make_engine(gate), make_engine()]
    app = create_app(engines[0]) if whole else web.Application()
    if not whole:
        setup(app, engines[0], "/v1")
    setup(app, engines[1], "/b/v1")
    async with application(app) as client:
        streams = [asyncio.create_task(complete(client, "/v1", stream=each)) for each in (True, False)]
        await until(lambda: engines[0].stats().running + engines[0].stats().waiting == 2)
        stopping = asyncio.create_task(app.shutdown())
        # All engines drain at the same time.
        await until(lambda: not any(engine.ready for engine in engines))
        for prefix in ("/v1", "/b/v1"):
            assert (await complete(client, prefix)).status == 503
        assert not stopping.done()
        gate.release()
        streamed, entire = await asyncio.gather(*streams)
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert entire.json()["choices"][0]["finish_reason"] == "length"
        await stopping


async def test_the_time_to_drain_is_bounded(gate: Gate) -> None:
    engine = make_engine(gate)
    app = web.Application()
    setup(app, engine, config=ServerConfig(drain_timeout=0.05))
    async with application(app) as client:
        stream = asyncio.create_task(complete(client, "/v1"))
        await until(lambda: engine.stats().running == 1)
        closing = asyncio.create_task(app.shutdown())
        reply = await stream
        assert '"error"' in reply.text
        assert "[DONE]" not in reply.text
        gate.release()
        await closing


@pytest.mark.parametrize("most", [0, 1000])
async def test_the_application_bounds_bodies(most: int) -> None:
    app = web.Application(client_max_size=most)
    setup(app, make_engine())
    body = json.dumps({"prompt": [1, 2], "max_tokens": 1}).encode().ljust(1001)

    async def parts() -> AsyncIterator[bytes]:
        """Without a length."""
        for at in range(0, len(body), 100):
            yield body[at : at + 100]

    async with application(app) as client:
        for data, more in ((body, {}), (parts(), {}), (gzip.compress(body), {"Content-Encoding": "gzip"})):
            headers = {"Content-Type": "application/json", **more}
            async with client.session.post("/v1/completions", data=data, headers=headers) as response:
                assert response.status == (413 if most else 200)
        assert (await client.post("/v1/completions", body[:1000])).status == 200
