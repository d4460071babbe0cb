"""Ids of requests, the access log, and requests in the trace."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import anthropic
import pytest
from aiohttp import web

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.server import setup
from aioinfer.server.http.logs import JsonLines
from aioinfer.testing import Answer, FakeEngine
from tests.engine.conftest import Gate
from tests.server.calls import http
from tests.server.conftest import Connect, Serving, run_server
from tests.server.raw import request
from tests.server.test_adversity import ENDLESS, PATH, until
from tests.server.test_keys import opened
from tests.server.test_mounting import application, make_engine

BODY = {**ENDLESS, "stream": False, "max_tokens": 5}
ID = "x-request-id"


# -- ids -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/health", None, 200),
        ("GET", "/v1/models/other", None, 404),
        ("GET", "/nowhere", None, 404),
        ("DELETE", "/v1/models", None, 405),
        ("GET", "/debug/trace", None, 200),
        ("POST", PATH, BODY, 200),
        ("POST", PATH, {**BODY, "stream": True}, 200),
        ("POST", PATH, {**BODY, "max_tokens": -1}, 400),
        ("POST", PATH, {**BODY, "stream": True, "prompt": [1] * 5000}, 400),
    ],
)
async def test_every_response_has_the_id(
    serving: Serving, method: str, path: str, body: Any, status: int
) -> None:
    async with serving() as served:
        for given in ("abc-123", None):
            headers = {} if given is None else {ID: given}
            reply = await served.http(method, path, body, **headers)
            assert reply.status == status
            name = reply.headers[ID]
            assert name == given if given else len(name) == 32
            if status >= 400:
                assert reply.error["message"]
            elif body is not None:
                # The answer's id says which request it belongs to.
                assert f'"cmpl-{name}"' in reply.text


async def test_an_id_that_is_long_or_not_plain_is_replaced(serving: Serving) -> None:
    async with serving() as served:
        for given in ("", "a b", "x" * 129, "é", 'a"b', "a\tb"):
            reply = await served.get("/v1/models", **{ID: given})
            assert (reply.status, len(reply.headers[ID])) == (200, 32)


async def test_the_body_may_name_the_answer_otherwise(serving: Serving) -> None:
    async with serving() as served:
        reply = await served.post(PATH, {**BODY, "request_id": "mine"}, **{ID: "of-proxy"})
    assert (reply.headers[ID], reply.json()["id"]) == ("of-proxy", "cmpl-mine")


async def test_refusals_before_every_handler_have_an_id(serving: Serving) -> None:
    async with serving(server={"api_key": "k"}) as served:
        for path, headers, status in (
            ("/v1/models", {}, 401),
            ("/v1/models", {"Origin": "https://evil.example"}, 403),
            ("/health", {"Expect": "nonsense"}, 417),
        ):
            reply = await served.get(path, **headers, **{ID: "id-7"})
            assert (reply.status, reply.headers[ID]) == (status, "id-7")


async def test_a_mounted_engine_has_ids_and_its_application_is_left_alone() -> None:
    async def own(request: web.Request) -> web.Response:
        return web.Response(text="own")

    app = web.Application()
    app.router.add_get("/own", own)
    for prefix in ("/a/v1", "/b/v1"):
        setup(app, make_engine(), prefix)
    async with application(app) as client:
        for path, status in (("/a/v1/models", 200), ("/b/v1/models/other", 404)):
            reply = await client.get(path, **{ID: "given"})
            assert (reply.status, reply.headers.getall(ID)) == (status, ["given"])
        reply = await client.get("/own", **{ID: "given"})
        assert (reply.text, ID in reply.headers) == ("own", False)


async def test_the_clients_read_the_id(serving: Serving) -> None:
    """Anthropic's in another header, and in the objects of errors."""
    message: Any = {"model": "toy", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
    async with (
        serving() as served,
        served.client() as client,
        anthropic.AsyncAnthropic(base_url=served.url, api_key="k", max_retries=0) as other,
    ):
        chat: Any = client.chat.completions.create
        for create in (chat, other.messages.create):
            answer = await create(**message, extra_headers={ID: "from-client"})
            assert answer._request_id == "from-client"
        with pytest.raises(anthropic.BadRequestError) as refused:
            await other.messages.create(**{**message, "max_tokens": -1}, extra_headers={ID: "second"})
        body: Any = refused.value.body
        assert refused.value.request_id == body["request_id"] == "second"


async def test_the_trace_names_requests(serving: Serving) -> None:
    async with serving() as served:
        for name in ("first", "second"):
            assert (await served.post(PATH, BODY, **{ID: name})).status == 200
        events = (await served.get("/debug/trace")).json()["traceEvents"]
    begun = {event["id"]: event for event in events if event["ph"] == "b"}
    ended = {event["id"]: event for event in events if event["ph"] == "e"}
    assert [event["name"] for event in begun.values()] == ["first", "second"]
    assert begun.keys() == ended.keys()
    for number, event in begun.items():
        assert event["args"] == {"tokens": 5}
        assert 0 <= event["ts"] <= ended[number]["ts"]


async def test_embeddings_and_scores_have_the_id_too(serving: Serving) -> None:
    calls: dict[str, Any] = {
        "embeddings": {"input": ["a", "b"]},
        "score": {"text_1": "a", "text_2": ["b", "c"], "method": "cosine"},
        "rerank": {"query": "a", "documents": ["b", "c"], "method": "cosine"},
    }
    async with serving() as served:
        for route, body in calls.items():
            reply = await served.post(f"/v1/{route}", body, **{ID: f"of-{route}"})
            assert reply.json().get("id", f"{route}-of-{route}") == f"{route}-of-{route}"
        events = (await served.get("/debug/trace")).json()["traceEvents"]
    assert [each["name"] for each in events if each["ph"] == "b"] == [f"of-{route}" for route in calls]


# -- the access log ------------------------------------------------------------------------------------


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "aioinfer.access")
    return lambda: [line_of(each) for each in caplog.records if each.name == "aioinfer.access"]


def line_of(record: logging.LogRecord) -> str:
    """What the command line writes."""
    return record.getMessage() if record.msg == "%s" else JsonLines().format(record)


LOG = {"access_log": True, "access_log_format": "json"}


async def test_a_line_has_what_a_call_cost(serving: Serving, lines: Any) -> None:
    async with serving(server={**LOG, "api_key": "k"}) as served:
        headers = {"User-Agent": "test/1", "Authorization": "Bearer k"}
        for stream in (False, True):
            body = {**BODY, "stream": stream, "n": 2}
            await served.post(f"{PATH}?secret=1", body, **headers, **{ID: f"id-{stream}"})
        await until(lambda: len(lines()) == 2)
    for line, stream in zip(lines(), (False, True), strict=True):
        entry = json.loads(line)
        assert 0 < entry.pop("ttft") <= entry["seconds"] + 1
        assert entry.pop("seconds") > 0
        assert entry.pop("bytes") > 0
        assert entry.pop("time").startswith("20")
        assert entry == {
            "remote": "127.0.0.1",
            "method": "POST",
            "path": "/v1/completions",
            "status": 200,
            "id": f"id-{stream}",
            "key": "api_key",
            "model": "toy",
            "prompt_tokens": 3,
            "output_tokens": 10,
            "finish_reason": "length",
            "user_agent": "test/1",
        }


async def test_a_line_says_how_a_call_ended(serving: Serving, lines: Any, gate: Gate) -> None:
    async with serving(server=LOG, fault=gate) as served:
        for stream in (True, False):
            asked = {**ENDLESS, "stream": stream}
            leaving = asyncio.create_task(served.http.session.post(PATH, json=asked))
            await until(lambda: opened(served) == 1)
            if stream:
                gate.step(2)
                (await leaving).close()
            else:
                leaving.cancel()
            gate.step(3)
            await until(lambda: opened(served) == 0)
        await until(lambda: len(lines()) == 2)
        gate.release()
        assert (await served.post(PATH, {**BODY, "model": "other"})).status == 404
        assert (await served.post(PATH, {**BODY, "request_id": "mine"}, **{ID: "x"})).status == 200
        await until(lambda: len(lines()) == 4)
    streamed, whole, refused, good = map(json.loads, lines())
    assert streamed["finish_reason"] == whole["finish_reason"] == "disconnect"
    assert "finish_reason" not in refused
    assert refused["status"] == 404
    assert (good["call"], good["id"]) == ("cmpl-mine", "x")


async def test_an_engine_that_fails_amid_a_stream_is_an_error_in_the_log(
    serving: Serving, lines: Any
) -> None:
    def fails(step: Any) -> None:
        if step.id >= 3:
            raise ValueError("planted")

    async with serving(server=LOG, fault=fails) as served:
        for stream in (True, False):
            await served.post(PATH, {**ENDLESS, "stream": stream})
        await until(lambda: len(lines()) == 2)
    assert [json.loads(line)["finish_reason"] for line in lines()] == ["error", "error"]


@pytest.mark.parametrize("form", ["text", "json"])
async def test_records_have_the_fields_of_their_line(
    serving: Serving, caplog: pytest.LogCaptureFixture, form: str
) -> None:
    """For formatters that make JSON themselves: the message is none."""
    caplog.set_level(logging.INFO, "aioinfer.access")
    async with serving(server={**LOG, "access_log_format": form}) as served:
        await served.post(PATH, BODY, **{ID: "mine"})
        await served.get("/nothing-here")
    called, missing = (vars(each) for each in caplog.records if each.name == "aioinfer.access")
    assert (called["status"], called["id"], called["output_tokens"]) == (200, "mine", 5)
    assert called["ttft"] > 0
    assert (missing["status"], missing["path"], "ttft" in missing) == (404, "/nothing-here", False)
    if form == "json":
        assert called["message"] == '"POST /v1/completions" 200'


@pytest.mark.parametrize("path", ["chat/completions", "responses", "messages"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_of_a_tool_is_logged_as_one(lines: Any, path: str, stream: bool) -> None:
    tool: dict[str, Any] = {"name": "now", "description": "the time"}
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    messages = [{"role": "user", "content": "x"}]
    bodies: dict[str, dict[str, Any]] = {
        "chat/completions": {
            "messages": messages,
            "tools": [{"type": "function", "function": {**tool, "parameters": schema}}],
        },
        "responses": {"input": "x", "tools": [{"type": "function", **tool, "parameters": schema}]},
        "messages": {"messages": messages, "max_tokens": 99, "tools": [{**tool, "input_schema": schema}]},
    }
    config = EngineConfig(model="fake", tool_call_parser="hermes")
    engine = FakeEngine([Answer(tool_calls=[("now", {})]), Answer("it is late")], config=config)
    async with run_server(engine, ServerConfig(port=0, **LOG)) as running, http(running.url) as client:
        for _ in range(2):
            reply = await client.post(f"/v1/{path}", {**bodies[path], "stream": stream})
            assert reply.status == 200, reply.text
        await until(lambda: len(lines()) == 2)
    assert [json.loads(line)["finish_reason"] for line in lines()] == ["tool_calls", "stop"]


async def test_there_is_no_line_without_the_setting(serving: Serving, lines: Any) -> None:
    async with serving() as served:
        assert (await served.post(PATH, BODY)).status == 200
    assert lines() == []


@pytest.mark.parametrize("form", ["text", "json"])
async def test_no_client_can_write_a_line_of_its_own(
    serving: Serving, connect: Connect, lines: Any, form: str
) -> None:
    async with serving(server={**LOG, "access_log_format": form}) as served:
        raw = await connect(served)
        await raw.send(
            request(
                path="/%0aGET%20/x" + "y" * 5000, User_Agent='a" status=200 \u2028é' + "z" * 5000, **{ID: "q"}
            )
        )
        assert await raw.status() == 404
        await until(lambda: len(lines()) == 1)
    (line,) = lines()
    assert line.isascii()
    assert line.isprintable()
    assert len(line) < 800
    assert "%0aGET%20/x" in line
    if form == "json":
        assert json.loads(line)["user_agent"].startswith('a" status=200')
    else:
        assert line.startswith('127.0.0.1 "GET /%0aGET')
        assert ' id="q" ' in line
        assert 'user_agent="a\\" status=200' in line
