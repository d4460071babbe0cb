"""A server over a dispatcher: the routes that an engine has, and what they say when replicas are lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import openai
import pytest
from aiohttp import web

from aioinfer import SamplingParams
from aioinfer.config import ServerConfig
from aioinfer.engine import Engine, EngineState
from aioinfer.parallel import Dispatcher
from aioinfer.server import asgi_app, create_app
from aioinfer.testing import Answer, FakeEngine
from tests.asgi import Exchange
from tests.engine.conftest import Gate
from tests.observe.scrapes import read_text, values
from tests.server.calls import Http, http
from tests.server.conftest import run_server, without_certificates
from tests.server.test_mounting import make_engine
from tests.tiers import SECONDS, rest
from tests.toys.adapters import write_toy_adapter

MESSAGES = [{"role": "user", "content": "hello"}]
SCHEMA = {"name": "wrong", "schema": {"type": "nonsense"}}


def lose(engine: Engine) -> None:
    engine._runtime.lost(RuntimeError("it is gone"))


@dataclass
class Site:
    """A running server over a dispatcher, and clients of it."""

    engines: list[Any]
    dispatcher: Dispatcher
    client: Any
    _public: Http
    _admin: Http

    async def get(self, path: str) -> tuple[int, Any]:
        reply = await self._public.get(path)
        return reply.status, reply.json() if reply.type == "application/json" else reply.text

    async def admin(self, method: str, path: str) -> Any:
        reply = await self._admin(method, path)
        assert reply.status == 200, reply.text
        return reply.json()


@asynccontextmanager
async def site(tmp_path: Any, engines: list[Engine], **settings: Any) -> AsyncIterator[Site]:
    dispatcher = Dispatcher(engines, policy="round_robin")
    path = str(tmp_path / "admin")
    config = ServerConfig(port=0, drain_timeout=60.0, admin_uds=path, **settings)
    async with (
        run_server(dispatcher, config) as running,
        http(running.url) as public,
        http(f"unix:{path}") as admin,
        openai.AsyncOpenAI(
            base_url=f"{running.url}/v1", api_key="none", max_retries=0, http_client=without_certificates()
        ) as client,
    ):
        yield Site(engines, dispatcher, client, public, admin)
    assert all(each.closed for each in engines)


async def test_chats_and_completions_whole_and_streamed(tmp_path: Any) -> None:
    answer = Answer("Hello, world.", reasoning="Greet.")
    async with site(tmp_path, [FakeEngine(answer) for _ in range(3)]) as served:
        chats = served.client.chat.completions
        whole = await chats.create(model="fake", messages=MESSAGES, n=3)
        assert [each.message.content for each in whole.choices] == ["Hello, world."] * 3
        streams = [await chats.create(model="fake", messages=MESSAGES, stream=True) for _ in range(4)]
        for stream in streams:
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            assert "".join(pieces) == "Hello, world."
        for served_engine in served.engines:
            served_engine.answers = "Once."
        stream = await served.client.completions.create(model="fake", prompt=["a", "b"], stream=True, n=2)
        texts = ["", "", "", ""]
        async for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
        assert texts == ["Once."] * 4
        assert [len(each.requests) for each in served.engines] == [4, 4, 3]
        assert not served.dispatcher._started().open


@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_have_their_status_before_a_stream_begins(tmp_path: Any, stream: bool) -> None:
    async with site(tmp_path, [make_engine(), make_engine()]) as served:
        bodies: list[dict[str, Any]] = [
            {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
            {"messages": [{"role": "user", "content": "x" * 10_000}]},
            {"model": "other"},
        ]
        for body in bodies:
            asked: Any = {"model": "toy", "messages": MESSAGES, "stream": stream, **body}
            with pytest.raises(openai.APIStatusError) as refused:
                await served.client.chat.completions.create(**asked)
            assert refused.value.status_code == (404 if "model" in body else 400)
        assert not served.dispatcher._started().open


async def test_the_other_routes(tmp_path: Any) -> None:
    async with site(tmp_path, [make_engine(), make_engine()]) as served:
        status, models = await served.get("/v1/models")
        assert (status, models["data"][0]["id"], models["data"][0]["max_model_len"]) == (200, "toy", 8192)
        for path in ("/health", "/readyz", "/ping"):
            assert await served.get(path) == (200, {"status": "ok"})
        assert (await served.get("/debug/trace"))[0] == 200
        asked: Any = {"max_tokens": 5, "extra_body": {"ignore_eos": True}}
        await served.client.completions.create(model="toy", prompt="abc", **asked)
        status, text = await served.get("/metrics")
        series = values(read_text(text))
        labels = frozenset({"model_name": "toy", "engine": "0"}.items())
        assert series["aioinfer_output_tokens_total", labels] == 5
        assert series["aioinfer_replicas", labels | {("state", "ready")}] == 2
        assert series["vllm:num_requests_running", labels] == 0


async def test_admin_routes_act_on_all_replicas(tmp_path: Any) -> None:
    async with site(tmp_path, [make_engine() for _ in range(3)]) as served:
        assert await served.admin("POST", "/pause") == {"state": "running", "paused": True}
        assert all(each.stats().paused for each in served.engines)
        asked = asyncio.ensure_future(
            served.client.completions.create(model="toy", prompt="abc", max_tokens=5)
        )
        while not served.dispatcher.stats().waiting:
            await asyncio.sleep(0)
        stats = await served.admin("GET", "/stats")
        assert (stats["waiting"], stats["paused"], stats["resumed"]) == (1, True, 0)
        assert [each["name"] for each in stats["replicas"]] == ["local-0", "local-1", "local-2"]
        assert [each["state"] for each in stats["replicas"]] == ["ready"] * 3
        assert sum(each["stats"]["waiting"] for each in stats["replicas"]) == 1
        assert await served.admin("POST", "/resume") == {"state": "running", "paused": False}
        await asked
        assert (await served.admin("POST", "/flush"))["freed_pages"] > 0
        lose(served.engines[0])
        stats = await served.admin("GET", "/stats")
        assert stats["replicas"][0]["cause"] == "it is gone"
        assert await served.admin("POST", "/drain") == {"state": "closed", "paused": False}
        assert (await served.get("/readyz"))[0] == 503


async def test_readiness_says_degraded_while_one_is_left_and_503_with_none(tmp_path: Any) -> None:
    async with site(tmp_path, [make_engine() for _ in range(3)]) as served:
        for number in range(2):
            lose(served.engines[number])
            for path in ("/health", "/readyz", "/ping"):
                assert await served.get(path) == (200, {"status": "degraded"})
        await served.client.completions.create(model="toy", prompt="abc", max_tokens=5)
        lose(served.engines[2])
        assert await served.get("/readyz") == (503, {"status": "failed"})
        assert (await served.get("/livez"))[0] == 200
        assert (await served.get("/v1/models"))[0] == 200
        with pytest.raises(openai.InternalServerError):
            await served.client.completions.create(model="toy", prompt="abc", max_tokens=5)
        await served.dispatcher.restart("local-1")
        assert await served.get("/readyz") == (200, {"status": "degraded"})
        await served.dispatcher.restart()
        assert await served.get("/readyz") == (200, {"status": "ok"})
        await served.client.completions.create(model="toy", prompt="abc", max_tokens=5)


async def test_one_replica_that_hangs_does_not_make_the_others_unready(tmp_path: Any, gate: Gate) -> None:
    """Seen elsewhere: an orchestrator kills all for one that hangs."""
    engines = [make_engine(gate), make_engine()]
    async with site(tmp_path, engines, stall_timeout=0.05) as served:
        held = served.dispatcher.generate([1, 2], SamplingParams(max_tokens=2, ignore_eos=True))
        while (await served.get("/readyz"))[1] == {"status": "ok"}:
            await asyncio.sleep(0.01)
        assert await served.get("/readyz") == (200, {"status": "degraded"})
        await served.client.completions.create(model="toy", prompt="abc", max_tokens=5)
        gate.release()
        await held
        assert await served.get("/readyz") == (200, {"status": "ok"})


@rest(SECONDS)
async def test_a_stream_over_http_goes_on_when_its_replica_is_lost(tmp_path: Any) -> None:
    engines: list[Engine] = [FakeEngine("abcdefghij" * 3, pace=0.01) for _ in range(3)]
    async with site(tmp_path, engines) as served:
        stream = await served.client.completions.create(model="fake", prompt="a", stream=True, max_tokens=30)
        text, lost = "", False
        async for chunk in stream:
            text += chunk.choices[0].text
            if len(text) >= 10 and not lost:
                lost = True
                lose(next(each for each in engines if each.ready and each.stats().running))
        assert text == "abcdefghij" * 3
        assert served.dispatcher.stats().resumed == 1


@pytest.mark.parametrize("ours", [False, True])
async def test_an_application_of_aiohttp_with_a_dispatcher(ours: bool) -> None:
    dispatcher = Dispatcher([FakeEngine("Hi."), FakeEngine("Hi.")])
    if not ours:
        await dispatcher.start()
    runner = web.AppRunner(create_app(dispatcher))
    await runner.setup()
    assert dispatcher.ready
    await runner.cleanup()
    assert dispatcher.state is (EngineState.CLOSED if ours else EngineState.RUNNING)
    await dispatcher.aclose()


async def test_an_asgi_application_with_a_dispatcher() -> None:
    async with Dispatcher([FakeEngine("Hi."), FakeEngine("Hi.")]) as dispatcher:
        app = asgi_app(dispatcher)
        body = {"model": "fake", "messages": MESSAGES, "stream": True}
        answered = await Exchange("POST", "/v1/chat/completions", body=body).run(app)
        assert answered.status == 200
        assert b"[DONE]" in answered.body
        assert (await Exchange("GET", "/health").run(app)).status == 200


class Gated(Engine):
    """Starts again when it may."""

    gate: asyncio.Event | None = None

    async def start(self, progress: Any = None) -> None:
        if self.gate is not None:
            await self.gate.wait()
        await super().start(progress)


async def test_an_adapter_is_known_while_the_only_replica_restarts_and_unknown_names_are_not_denied(
    tmp_path: Any,
) -> None:
    adapter = write_toy_adapter(tmp_path / "one", "one")
    engine = make_engine(kind=Gated, max_adapters=3)
    assert isinstance(engine, Gated)
    async with site(tmp_path, [engine]) as served:
        ask = partial(served.client.completions.create, prompt="abc", max_tokens=5, temperature=0)
        await served.dispatcher.load_adapter("sql", adapter)
        before = await ask(model="sql")
        engine.gate = asyncio.Event()
        restart = asyncio.ensure_future(served.dispatcher.restart("local-0"))
        while served.dispatcher.ready:
            await asyncio.sleep(0)
        waiting = asyncio.ensure_future(ask(model="sql"))
        assert (await served.get("/v1/models/sql"))[0] == 200
        assert [each["id"] for each in (await served.get("/v1/models"))[1]["data"]] == ["toy", "sql"]
        assert (await served.get("/v1/models/other"))[0] == 503
        with pytest.raises(openai.APIStatusError) as refused:
            await ask(model="other")
        assert refused.value.status_code == 503
        assert not waiting.done()
        engine.gate.set()
        await restart
        assert (await waiting).choices[0].text == before.choices[0].text
        assert (await served.get("/v1/models/other"))[0] == 404
        lose(engine)
        while served.dispatcher.ready:
            await asyncio.sleep(0)
        for name in ("sql", "other"):
            with pytest.raises(openai.APIStatusError) as refused:
                await ask(model=name)
            assert refused.value.status_code == 503


async def test_a_session_goes_on_though_no_replica_holds_it(tmp_path: Any) -> None:
    async with site(tmp_path, [make_engine(), make_engine()]) as served:
        made = await served.client.post("/sessions", body={}, cast_to=object)
        extra = {"session": made["id"]}
        for count in (1, 2):
            answer = await served.client.chat.completions.create(
                model="toy", messages=MESSAGES, max_tokens=4, extra_body=extra
            )
            assert answer.usage.prompt_tokens > count * len(MESSAGES[0]["content"])
        _, found = await served.get(f"/v1/sessions/{made['id']}")
    assert found["num_tokens"] == answer.usage.total_tokens
