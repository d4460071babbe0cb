"""The ASGI application run alone, where its lifespan starts the engine, and mounted, where another does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from aioinfer.config import ServerConfig
from aioinfer.engine import Engine, EngineState
from aioinfer.errors import ConfigError, OutOfMemory
from aioinfer.server import asgi_app
from aioinfer.testing import Answer
from tests.asgi import Application, Exchange, uvicorned
from tests.server.raw import errors
from tests.server.test_adversity import until
from tests.server.test_asgi import CHAT, ENDLESS, PROMPT, engine, no_tasks
from tests.tiers import SECONDS, rest

fastapi = pytest.importorskip("fastapi", reason="fastapi is not installed")

WEATHER: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}


# -- lifespans -----------------------------------------------------------------------------------------


class Lifespan:
    """A server that runs an application alone."""

    def __init__(self, app: Application) -> None:
        self.events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        self.task = asyncio.ensure_future(app({"type": "lifespan"}, self.events.get, self.send))

    async def send(self, event: dict[str, Any]) -> None:
        self.sent.append(event)

    async def startup(self) -> str:
        self.events.put_nowait({"type": "lifespan.startup"})
        await until(lambda: bool(self.sent))
        return str(self.sent[-1]["type"])

    async def shutdown(self) -> None:
        self.events.put_nowait({"type": "lifespan.shutdown"})
        await self.task
        assert self.sent[-1] == {"type": "lifespan.shutdown.complete"}


async def test_a_server_that_runs_it_alone_starts_and_closes_the_engine_each_time() -> None:
    one = engine()
    app = asgi_app(one)
    for _ in range(2):
        server = Lifespan(app)
        assert await server.startup() == "lifespan.startup.complete"
        assert one.ready
        assert (await Exchange("POST", "/v1/chat/completions", CHAT).run(app)).status == 200
        await server.shutdown()
        assert one.state is EngineState.CLOSED
        assert (await Exchange("GET", "/health").run(app)).status == 503
    await no_tasks()


def test_it_runs_on_one_loop_after_the_other() -> None:
    one = engine()
    app = asgi_app(one)

    async def alone() -> None:
        server = Lifespan(app)
        await server.startup()
        assert (await Exchange("POST", "/v1/chat/completions", CHAT).run(app)).status == 200
        await server.shutdown()

    async def mounted() -> None:
        async with one:
            assert (await Exchange("POST", "/v1/chat/completions", CHAT).run(app)).status == 200

    for run in (alone, mounted, mounted, alone):
        asyncio.run(run())


@rest(SECONDS)
async def test_a_shutdown_drains() -> None:
    one = engine(Answer("x" * 200, pace=0.001))
    app = asgi_app(one)
    server = Lifespan(app)
    await server.startup()
    exchange = Exchange("POST", "/v1/completions", {**PROMPT, "max_tokens": 200, "stream": True})
    serving = asyncio.create_task(exchange.run(app))
    await until(lambda: one.stats().output_tokens > 3)
    feed = Exchange("GET", "/debug/steps")
    watching = asyncio.create_task(feed.run(app))
    await until(lambda: len(feed.events) > 2)
    await server.shutdown()
    await serving
    assert exchange.body.endswith(b"data: [DONE]\n\n")
    await watching
    assert feed.complete


async def test_a_server_that_is_cancelled_closes_the_engine_at_once() -> None:
    one = engine(ENDLESS)
    app = asgi_app(one)
    server = Lifespan(app)
    await server.startup()
    serving = asyncio.create_task(
        Exchange("POST", "/v1/completions", {**PROMPT, "max_tokens": 9000}).run(app)
    )
    await until(lambda: one.stats().output_tokens > 3)
    server.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await server.task
    assert one.state is EngineState.CLOSED
    assert (await serving).status == 503


async def test_an_engine_that_was_started_before_is_left_running() -> None:
    async with engine() as one:
        server = Lifespan(asgi_app(one))
        await server.startup()
        await server.shutdown()
        assert one.ready


@pytest.mark.parametrize(
    ("error", "logged"),
    [(ConfigError("no such model"), 0), (OutOfMemory("none left"), 0), (KeyError("a"), 1)],
)
async def test_a_start_that_fails_is_told_to_the_server(
    error: Exception, logged: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()
    app = asgi_app(one)

    async def fail() -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(one, "start", fail)
        server = Lifespan(app)
        assert await server.startup() == "lifespan.startup.failed"
        await server.task
    assert server.sent == [{"type": "lifespan.startup.failed", "message": f"{type(error).__name__}: {error}"}]
    assert len(errors(caplog)) == logged
    again = Lifespan(app)
    assert await again.startup() == "lifespan.startup.complete"
    await again.shutdown()


async def test_an_engine_that_nobody_has_started_is_a_503_that_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = engine()
    app = asgi_app(one)
    for _ in range(2):
        found = await Exchange("POST", "/v1/chat/completions", CHAT).run(app)
        assert found.status == 503
        assert found.json()["error"]["code"] == "engine_not_started"
    assert "async with engine" in found.json()["error"]["message"]
    (record,) = caplog.records
    assert "the engine is not started" in record.getMessage()
    async with one:
        assert (await Exchange("POST", "/v1/chat/completions", CHAT).run(app)).status == 200
    found = await Exchange("POST", "/v1/chat/completions", CHAT).run(app)
    assert (found.status, found.json()["error"]["message"]) == (503, "the engine is not serving")


def test_keys_that_cannot_be_read_are_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keys"):
        asgi_app(engine(), ServerConfig(api_keys=str(tmp_path / "keys.yaml")))


async def test_there_are_no_websockets_and_no_other_scopes() -> None:
    app = asgi_app(engine())
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(event: Any) -> None:
        sent.append(event["type"])

    await app({"type": "websocket", "path": "/v1/chat/completions"}, receive, send)
    assert sent == ["websocket.close"]
    with pytest.raises(ValueError, match="'webtransport'"):
        await app({"type": "webtransport"}, receive, send)


# -- mounted -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scope", "root"),
    [
        ({"path": "/v1/models/a/b", "raw_path": b"/v1/models/a%2Fb"}, "/"),
        ({"path": "/llm/v1/models/a/b", "raw_path": b"/llm/v1/models/a%2Fb", "root_path": "/llm"}, "/llm"),
        ({"path": "/llm/v1/models/a/b", "raw_path": b"/llm/v1/models/a%2Fb", "root_path": "/llm/"}, "/llm"),
        ({"path": "/é/v1/models/a/b", "raw_path": b"/%c3%a9/v1/models/a%2Fb", "root_path": "/é"}, "/é"),
        ({"path": "/x/y/v1/models/a/b", "raw_path": b"/x%2fy/v1/models/a%2Fb", "root_path": "/x/y"}, None),
        # of servers that take the root off, and of those without the path as it was sent
        ({"path": "/v1/models/a/b", "raw_path": b"/v1/models/a%2Fb", "root_path": "/llm"}, "/llm"),
        ({"path": "/llm/v1/models/ab", "root_path": "/llm"}, "/llm"),
        ({"path": "/v1/v1/models/ab", "raw_path": b"/v1/v1/models/ab", "root_path": "/v1"}, "/v1"),
        ({"path": "/v1x/v1/models/ab", "raw_path": b"/v1x/v1/models/ab", "root_path": "/v1"}, None),
    ],
)
async def test_paths_begin_at_the_root(scope: dict[str, Any], root: str | None) -> None:
    async with engine() as one:
        app = asgi_app(one, ServerConfig(served_model_name="a/b, ab"))
        given = {"path": "/", **scope}
        found = await Exchange("GET", given.pop("path"), **given).run(app)
        if root is None:
            assert found.status == 404
            return
        assert found.status == 200
        assert found.json()["id"] in ("a/b", "ab")
        path = given.get("root_path", "").rstrip("/")
        document = await Exchange("GET", f"{path}/openapi.json", root_path=path).run(app)
        assert document.json()["servers"] == [{"url": root}]


async def test_the_page_is_at_the_root() -> None:
    async with engine() as one:
        for path, root in (("/", ""), ("/llm/", "/llm"), ("/llm", "/llm")):
            found = await Exchange("GET", path, root_path=root).run(asgi_app(one))
            assert found.status == 200
            assert b'data-api="v1"' in found.body


def mounting(one: Engine, config: ServerConfig | None = None) -> Any:
    """A FastAPI application that has the engine under /llm."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        async with one:
            yield

    app = fastapi.FastAPI(lifespan=lifespan)
    app.mount("/llm", asgi_app(one, config))
    return app


@rest(SECONDS)
async def test_the_openai_client_of_an_engine_in_fastapi() -> None:
    one = engine({"weather": Answer(tool_calls=[("weather", {"city": "Rome"})]), "": "Hello, and bye!"})
    async with (
        uvicorned(mounting(one, ServerConfig(api_key="secret-key"))) as port,
        openai.AsyncOpenAI(
            base_url=f"http://127.0.0.1:{port}/llm/v1",
            api_key="secret-key",
            max_retries=0,
            _strict_response_validation=True,
        ) as client,
    ):
        model = (await client.models.list()).data[0].id
        messages: Any = CHAT["messages"]
        stream = await client.chat.completions.create(model=model, messages=messages, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "Hello, and bye!"
        whole = await client.responses.create(
            model=model,
            input="weather",
            tools=[
                {"name": "weather", "parameters": {"type": "object"}, "strict": False, "type": "function"}
            ],
        )
        assert whole.output[0].type == "function_call"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="another").models.list()
        async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
            async with session.get("/llm/livez") as response:
                assert (response.status, await response.json()) == (200, {"status": "ok"})
            async with session.get("/llm") as response:  # Starlette's redirect to /llm/
                assert response.content_type == "text/html"
                assert response.url.path == "/llm/"
    assert one.state is EngineState.CLOSED


def test_the_client_for_tests_of_fastapi() -> None:
    testing = pytest.importorskip("fastapi.testclient", reason="its client is not installed")
    one = engine()
    with testing.TestClient(mounting(one, ServerConfig(allowed_hosts="testserver"))) as client:
        for _ in range(2):
            assert client.post("/llm/v1/chat/completions", json=CHAT).json()["choices"]
        with client.stream("POST", "/llm/v1/chat/completions", json={**CHAT, "stream": True}) as response:
            assert [*response.iter_lines()][-2] == "data: [DONE]"
    assert one.state is EngineState.CLOSED
