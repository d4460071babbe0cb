"""Clients that leave FastAPI's and aiohttp's handlers: the request ends, streamed or not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from aioinfer import until_disconnected
from aioinfer.testing import Answer, FakeEngine
from tests.asgi import uvicorned
from tests.tiers import SECONDS, rest

fastapi = pytest.importorskip("fastapi", reason="fastapi is not installed")

ENDLESS = Answer("x" * 20_000, pace=0.001)


def fastapi_app(engine: FakeEngine, ends: list[str]) -> Any:
    app = fastapi.FastAPI()

    async def waited(request: fastapi.Request) -> dict[str, str]:
        try:
            return {"text": (await until_disconnected(request, engine.generate("a"))).text}
        except fastapi.HTTPException as gone:
            ends.append(str(gone.status_code))
            raise

    async def posted(request: fastapi.Request, body: dict[str, Any]) -> dict[str, str]:
        return await waited(request)

    async def streamed() -> Any:
        async def events() -> AsyncIterator[str]:
            async with engine.generate("a") as stream:
                async for chunk in stream:
                    yield f"data: {chunk.text}\n\n"

        return fastapi.responses.StreamingResponse(events(), media_type="text/event-stream")

    for call in (waited, posted):  # annotations of nested functions are texts, which FastAPI cannot resolve
        call.__annotations__["request"] = fastapi.Request
    posted.__annotations__["body"] = dict[str, Any]
    app.get("/waited", response_model=None)(waited)
    app.post("/posted", response_model=None)(posted)
    app.get("/streamed", response_model=None)(streamed)
    return app


def aiohttp_app(engine: FakeEngine, ends: list[str]) -> web.Application:
    async def waited(request: web.Request) -> web.StreamResponse:
        try:
            return web.Response(text=(await until_disconnected(request, engine.generate("a"))).text)
        except web.HTTPException as gone:
            ends.append(str(gone.status))
            raise

    app = web.Application()
    app.router.add_get("/waited", waited)
    return app


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[int]:
    """Its port; by uvicorn, or by aiohttp without cancelling handlers."""
    if not isinstance(app, web.Application):
        async with uvicorned(app, lifespan="off") as port:
            yield port
        return
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


def raw(method: str, path: str) -> bytes:
    body = b"{}" if method == "POST" else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


@rest(SECONDS)
@pytest.mark.parametrize(
    ("make", "method", "path"),
    [
        (fastapi_app, "GET", "/waited"),
        (fastapi_app, "POST", "/posted"),
        (fastapi_app, "GET", "/streamed"),
        (aiohttp_app, "GET", "/waited"),
    ],
)
async def test_a_client_that_leaves_ends_its_request(make: Any, method: str, path: str) -> None:
    async with FakeEngine(ENDLESS) as engine:
        ends: list[str] = []
        async with served(make(engine, ends)) as port, asyncio.timeout(60):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw(method, path))
            while not engine.stats().decoding:
                await asyncio.sleep(0.001)
            if path == "/streamed":
                await reader.readuntil(b"data: x")
            writer.close()
            while engine.stats().running:
                await asyncio.sleep(0.001)
            if path != "/streamed":
                while not ends:
                    await asyncio.sleep(0)
                assert ends == ["499"]
            # Its memory is free when what is in flight has landed: two steps at the most.
            steps = engine.stats().steps
            while (stats := engine.stats()).pages_private or stats.pages_fenced:
                assert stats.steps <= steps + 2
                await asyncio.sleep(0.001)
            assert stats.steps <= steps + 2
            assert stats.output_tokens < 20_000


@pytest.mark.parametrize(("make", "path"), [(fastapi_app, "/waited"), (aiohttp_app, "/waited")])
async def test_a_client_that_stays_gets_its_answer(make: Any, path: str) -> None:
    async with FakeEngine("Hello!") as engine, served(make(engine, [])) as port, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw("GET", path))
        assert b"200 OK" in await reader.readuntil(b"Hello!")
        writer.close()


class Received:
    """A request of Starlette's, as far as it is looked at."""

    def __init__(self, *messages: dict[str, Any]) -> None:
        self.scope: dict[str, Any] = {}
        self.messages = [*messages]

    async def receive(self) -> dict[str, Any]:
        if not self.messages:
            await asyncio.Event().wait()
        return self.messages.pop(0)


async def test_results_errors_and_cancellation_pass_through() -> None:
    async def fail() -> None:
        raise KeyError("work")

    cancelled = asyncio.Event()

    async def endless() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async with FakeEngine("x") as engine:
        assert (await until_disconnected(Received(), engine.generate("a"))).text == "x"
        chat = engine.chat([{"role": "user", "content": "a"}])
        assert (await until_disconnected(Received(), chat)).content == "x"
    with pytest.raises(KeyError, match="work"):
        await until_disconnected(Received(), fail())
    task = asyncio.create_task(until_disconnected(Received(), endless()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()
    with pytest.raises(RuntimeError, match="read the body"):
        await until_disconnected(Received({"type": "http.request", "body": b"x"}), endless())
    work = endless()
    with pytest.raises(TypeError, match=r"awaitable|coroutine"):
        await until_disconnected(Received(), 5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="FastAPI, Starlette or aiohttp"):
        await until_disconnected(object(), work)
    work.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
