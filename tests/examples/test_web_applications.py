"""The examples of web applications, on loopback: their answers, and what their clients leave behind."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from aioinfer.testing import Answer, FakeEngine
from examples import aiohttp_app, host_metrics
from tests.asgi import uvicorned
from tests.engine.test_chat import freed
from tests.tiers import SECONDS, rest

fastapi_app = pytest.importorskip("examples.fastapi_app", reason="fastapi is not installed")
testclient = pytest.importorskip("fastapi.testclient", reason="its client is not installed")

SUM, STORY = "What is 20 + 22?", "Write a short story about Mira."
ENDLESS = Answer("x" * 20_000, pace=0.001)


def texts(events: str) -> str:
    return "".join(json.loads(event.removeprefix("data: ")) for event in events.split("\n\n") if event)


def said(socket: Any) -> str:
    """What is received up to the end of an answer."""
    text = ""
    while not (piece := socket.receive_json())["finish_reason"]:
        text += piece["text"]
    return text + str(piece["text"])


@rest(SECONDS)
async def test_the_aiohttp_example_answers_on_its_own_routes_and_on_openais() -> None:
    async with TestClient(TestServer(aiohttp_app.make_app())) as client:
        response = await client.get("/add/20/22")
        assert await response.json() == {"answer": "20 + 22 = 42"}
        response = await client.get("/story/Mira")
        assert response.content_type == "text/event-stream"
        assert "Mira" in texts(await response.text())
        response = await client.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hello!"}]}
        )
        assert (await response.json())["choices"][0]["message"]["content"].startswith("Hello!")


async def test_a_client_that_leaves_the_aiohttp_example_ends_its_story() -> None:
    app = aiohttp_app.make_app()
    engine = app[aiohttp_app.ENGINE] = FakeEngine(ENDLESS)
    async with engine, TestServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as session:
        response = await session.get("/story/Mira")
        await response.content.readuntil(b"x")
        response.close()
        await freed(engine)


def test_the_fastapi_example_answers_whole_by_events_and_by_a_websocket() -> None:
    with testclient.TestClient(fastapi_app.app, base_url="http://localhost") as client:
        assert client.get("/answer", params={"question": SUM}).json() == {"answer": "20 + 22 = 42"}
        events = client.get("/events", params={"question": SUM})
        assert events.headers["content-type"].startswith("text/event-stream")
        assert texts(events.text) == "20 + 22 = 42"
        with client.websocket_connect("/talk") as socket:
            for question, expected in ((SUM, "20 + 22 = 42"), ("What is 1 + 1?", "1 + 1 = 2")):
                socket.send_text(question)
                assert said(socket) == expected
        chat = {"messages": [{"role": "user", "content": SUM}]}
        answer = client.post("/llm/v1/chat/completions", json=chat).json()
        assert answer["choices"][0]["message"]["content"] == "20 + 22 = 42"


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """In place of the engine of the FastAPI example."""
    engine = FakeEngine(ENDLESS)
    monkeypatch.setattr(fastapi_app, "engine", engine)
    return engine


@rest(SECONDS)
@pytest.mark.parametrize("path", ["/answer", "/events"])
async def test_a_client_that_leaves_the_fastapi_example_ends_its_request(
    endless: FakeEngine, path: str
) -> None:
    async with uvicorned(fastapi_app.app) as port, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{port}{path}"
        asking = asyncio.create_task(session.get(url, params={"question": STORY}).__aenter__())
        while not endless.stats().decoding:
            await asyncio.sleep(0.001)
        if path == "/events":
            (await asking).close()
        else:
            asking.cancel()
        await freed(endless)


def test_a_question_ends_the_answer_before_it_and_so_does_leaving(endless: FakeEngine) -> None:
    endless.answers = {"story": ENDLESS, "": "short"}
    with testclient.TestClient(fastapi_app.app) as client, client.websocket_connect("/talk") as socket:
        socket.send_text("a story")
        assert socket.receive_json()["text"].strip("x") == ""
        socket.send_text("else")
        assert said(socket).strip("x") == "short"
        socket.send_text("a story")
        assert socket.receive_json()["text"].strip("x") == ""
        # Leaving the blocks ends the socket, and then the application, which drains its engine.
    assert endless.stats().output_tokens < 20_000


@rest(SECONDS)
async def test_the_metrics_of_the_engine_are_in_the_registry_of_the_application() -> None:
    for _ in range(2):  # a closed engine has left the registry
        async with TestClient(TestServer(host_metrics.make_app())) as client:
            before = await samples(client)
            assert (await client.get("/summary")).status == 200
            after = await samples(client)
            assert after["shop_summaries_total"] == before["shop_summaries_total"] + 1
            assert (before["aioinfer_output_tokens_total"], after["aioinfer_output_tokens_total"]) == (0, 32)
            openmetrics = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
            assert (await openmetrics.text()).endswith("# EOF\n")


async def samples(client: TestClient[Any, Any]) -> dict[str, float]:
    response = await client.get("/metrics")
    assert response.content_type == "text/plain"
    families = text_string_to_metric_families(await response.text())
    return {sample.name: sample.value for family in families for sample in family.samples}
