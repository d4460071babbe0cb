"""The service as an ASGI application within middlewares of Starlette, whose clients leave early."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from aioinfer.config import ServerConfig
from aioinfer.server import asgi_app
from aioinfer.testing import Answer, FakeEngine
from tests.asgi import Exchange, uvicorned
from tests.server.raw import errors, request
from tests.server.test_adversity import until

fastapi = pytest.importorskip("fastapi", reason="fastapi is not installed")

CHAT = {"messages": [{"role": "user", "content": "x"}]}
#: what a client waits for when it leaves
WAITED = {
    "chat/completions": CHAT,
    "completions": {"prompt": "x"},
    "messages": {**CHAT, "max_tokens": 9},
    "responses": {"input": "x"},
}


def framework(engine: FakeEngine, layers: int = 1) -> Any:
    app = fastapi.FastAPI()
    app.mount("/llm", asgi_app(engine, ServerConfig(access_log=True)))

    async def own(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    for _ in range(layers):
        app.middleware("http")(own)
    return app


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("path", WAITED)
async def test_a_client_that_leaves_before_its_answer_logs_no_error(
    caplog: pytest.LogCaptureFixture, path: str, layers: int
) -> None:
    caplog.set_level(logging.INFO, "aioinfer.access")
    async with FakeEngine(Answer("late", delay=3600)) as engine, uvicorned(framework(engine, layers)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("POST", f"/llm/v1/{path}", WAITED[path]))
        await until(lambda: engine.stats().running == 1)
        writer.close()
        await until(lambda: engine.stats().running == 0)
        await until(lambda: any(each.name == "aioinfer.access" for each in caplog.records))
        logged = [vars(each)["status"] for each in caplog.records if each.name == "aioinfer.access"]
        assert logged == [499]
    assert not errors(caplog)


async def test_a_client_that_leaves_amid_a_stream_or_its_body_logs_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeEngine(Answer("x" * 9999, pace=0.01)) as engine, uvicorned(framework(engine)) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("POST", "/llm/v1/chat/completions", {**CHAT, "stream": True}))
        await reader.readuntil(b"data: ")
        writer.close()
        await until(lambda: engine.stats().running == 0)
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("POST", "/llm/v1/chat/completions", CHAT)[:-9])
        await writer.drain()
        writer.close()
    assert not errors(caplog)


async def test_what_is_sent_behind_a_disconnect_is_one_empty_response() -> None:
    async with FakeEngine(Answer("late", delay=3600)) as engine:
        sent: list[Any] = []
        exchange = Exchange("POST", "/v1/chat/completions", CHAT)

        async def send(message: Any) -> None:
            sent.append(message)

        calling = asyncio.create_task(asgi_app(engine)(exchange.scope, exchange.receive, send))
        await until(lambda: engine.stats().running == 1)
        exchange.leave()
        await calling
        assert [each["type"] for each in sent] == ["http.response.start", "http.response.body"]
        assert (sent[0]["status"], sent[1]["body"]) == (499, b"")
