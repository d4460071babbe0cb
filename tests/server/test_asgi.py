"""The service as an ASGI application: the answers of ``serve``, bodies, clients that leave or are slow."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import logging
import re
import time
from functools import partial
from typing import Any

import aiohttp
import pytest
from yarl import URL

from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.server import asgi_app
from aioinfer.testing import Answer, FakeEngine
from tests.asgi import Exchange, uvicorned
from tests.server.conftest import run_server
from tests.server.raw import errors
from tests.server.test_adversity import until
from tests.tiers import SECONDS, nightly, rest

fastapi = pytest.importorskip("fastapi", reason="fastapi is not installed")

CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
PROMPT = {"prompt": "Hello", "max_tokens": 8}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
JSON = {"Content-Type": "application/json"}
GZIP = {"Content-Encoding": "gzip"}
PAGE = "https://chat.example"
ENDLESS = Answer("x" * 20_000, pace=0.001)
#: headers of the server, not of the application
HOP_BY_HOP = {"date", "server", "connection", "transfer-encoding"}
STREAM = "text/event-stream"


def engine(answers: Any = "Hello!", **settings: Any) -> FakeEngine:
    # Without cached prefixes, of which the second of two equal calls has more than the first.
    config = EngineConfig(
        model="fake", num_pages=4096, prefix_cache=False, tool_call_parser="hermes", **settings
    )
    return FakeEngine(answers, config=config)


async def no_tasks() -> None:
    """All tasks but this one end."""
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})


# -- the same answers ----------------------------------------------------------------------------------

CALLS: dict[str, tuple[str, str, dict[str, str], Any]] = {
    "chat": ("POST", "/v1/chat/completions", {}, CHAT),
    "chat, streamed": ("POST", "/v1/chat/completions", {}, {**CHAT, "stream": True}),
    "tools, streamed": ("POST", "/v1/chat/completions", {}, {**CHAT, "stream": True, "tools": [TOOL]}),
    "logprobs": ("POST", "/v1/completions", {}, {**PROMPT, "logprobs": 2, "echo": True}),
    "response": ("POST", "/v1/responses", {}, {"input": "Hello"}),
    "response, streamed": ("POST", "/v1/responses", {}, {"input": "Hello", "stream": True}),
    "message": ("POST", "/v1/messages", {}, {**CHAT, "max_tokens": 5}),
    "message, streamed": ("POST", "/v1/messages", {}, {**CHAT, "max_tokens": 5, "stream": True}),
    "gzip": ("POST", "/v1/completions", GZIP, gzip.compress(json.dumps(PROMPT).encode())),
    "large": ("POST", "/v1/completions", {}, b" " * 300_000),
    "no JSON": ("POST", "/v1/chat/completions", {}, b"{"),
    "model": ("GET", "/v1/models/an%2Fother", {}, None),
    "health": ("GET", "/health", {}, None),
    "HEAD": ("HEAD", "/health", {}, None),
    "HEAD of the feed": ("HEAD", "/debug/steps", {}, None),
    "the page": ("GET", "/", {}, None),
    "the document": ("GET", "/openapi.json?x=1", {}, None),
    "metrics": ("GET", "/metrics", {}, None),
    "trace": ("GET", "/debug/trace", {}, None),
    "no route": ("GET", "/v1/nothing", {}, None),
    "no key": ("GET", "/v1/models", {"Authorization": "Bearer another"}, None),
    "another origin": ("GET", "/v1/models", {"Origin": "https://evil.example"}, None),
    "a preflight": ("OPTIONS", "/v1/models", {"Origin": PAGE, "Access-Control-Request-Method": "GET"}, None),
    "a page": ("GET", "/v1/models", {"Origin": PAGE}, None),
    "another host": ("GET", "/v1/models", {"Host": "evil.example"}, None),
    "an id that is replaced": ("GET", "/version", {"x-request-id": "no id"}, None),
}
#: what changes from call to call
VARYING = ("/metrics", "/debug/trace")
#: and second by second
TIMES = r'"(?:created|created_at|completed_at)": ?(?:\d+|"[^"]*")|modelperm-\d+'


async def ask(base: str, case: str) -> tuple[int, dict[str, str], Any]:
    method, path, headers, body = CALLS[case]
    sent = {"Authorization": "Bearer secret-key", "x-request-id": "one", **headers}
    if body is not None:
        sent = {**JSON, **sent}
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, URL(base + path, encoded=True), data=data, headers=sent) as response,
    ):
        found = {name.lower(): value for name, value in response.headers.items()}
        kept = {name: value for name, value in found.items() if name not in HOP_BY_HOP}
        content = await response.text()
    if case == "an id that is replaced":
        assert kept.pop("x-request-id") == kept.pop("request-id") != "no id"
    if path in VARYING:
        kept.pop("content-length")
        content = ""
    content = re.sub(TIMES, "", content)
    # Of a response that is stored, ids are random.
    content = re.sub(r"(resp|msg|rs|fc)_[0-9a-f]{32}", r"\1_", content)
    return (
        response.status,
        kept,
        joined(content) if found.get("content-type", "").startswith(STREAM) else content,
    )


def joined(stream: str) -> tuple[list[str], str]:
    """The events of a stream without their texts, each once in a row, and all texts: how many tokens are in
    an event depends on when it is written."""
    text: list[str] = []

    def without(match: re.Match[str]) -> str:
        text.append(json.loads(match[2]))
        return f"{match[1]}..."

    shapes: list[str] = []
    for block in stream.split("\n\n"):
        shape = re.sub(r'"sequence_number": ?\d+', "", block)
        shape = re.sub(r'("(?:content|text|delta)": ?)("(?:[^"\\]|\\.)*")', without, shape)
        if shape not in shapes[-1:] and not shape.startswith(": ping"):
            shapes.append(shape)
    return shapes, "".join(text)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ServerConfig:
    keys = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("- {name: one, key: secret-key, tokens_per_minute: 1000000000}\n")
    names = "fake-model, an/other"
    return ServerConfig(
        port=0,
        api_keys=str(keys),
        cors_origins=PAGE,
        allowed_hosts="localhost",
        served_model_name=names,
        max_body_mib=0.25,
    )


@nightly("thirty calls, each of them to two servers")
@pytest.mark.parametrize("case", CALLS)
async def test_a_request_has_the_answer_of_serve(
    case: str, config: ServerConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each look at the clock is in another second, as some are when the machine is busy.
    monkeypatch.setattr(time, "time", partial(next, itertools.count(int(time.time()))))
    calls = [("weather", {"city": "Rome"})]
    answers = {"weather": Answer("One moment.", tool_calls=calls), "": "Hello, and bye!"}
    async with (
        engine(answers) as one,
        uvicorned(asgi_app(one, config), lifespan="off") as port,
        run_server(one, config) as running,
    ):
        expected = await ask(running.url, case)
        assert await ask(f"http://127.0.0.1:{port}", case) == expected
        if case in ("chat", "chat, streamed", "gzip", "model", "the page"):
            assert expected[0] == 200
    assert not errors(caplog)


# -- bodies --------------------------------------------------------------------------------------------


async def test_a_body_may_come_in_pieces() -> None:
    async with engine() as one:
        body = json.dumps(PROMPT).encode().ljust(300_000)
        exchange = Exchange("POST", "/v1/completions", parts=[])
        serving = asyncio.create_task(exchange.run(asgi_app(one)))
        for at in range(0, len(body), 10_000):
            exchange.give(body[at : at + 10_000], more=True)
        await until(exchange.incoming.empty)
        assert not exchange.events
        exchange.give(b"")
        await serving
        assert exchange.status == 200, exchange.body


async def test_a_body_without_end_is_refused_at_the_limit_and_received_no_further() -> None:
    async with engine() as one:
        exchange = Exchange("POST", "/v1/completions", parts=[b" " * (1 << 16)] * 1000)
        await exchange.run(asgi_app(one, ServerConfig(max_body_mib=1)))
        assert exchange.status == 413
        # 16 pieces are a MiB, and some more are on their way to the reader.
        assert exchange.incoming.qsize() > 1000 - 16 - 8


@pytest.mark.parametrize("length", ["many", "", "-1", "1_0"])
async def test_a_length_that_is_no_number_is_a_400(length: str) -> None:
    async with engine() as one:
        headers = [("content-length", length)]
        exchange = Exchange("POST", "/v1/completions", parts=[b"{}"], headers=headers)
        await exchange.run(asgi_app(one))
        assert exchange.status == 400
        assert exchange.json()["error"]["type"] == "invalid_request_error"
        assert "Content-Length" in exchange.json()["error"]["message"]


async def test_what_nobody_reads_of_a_body_is_not_kept_and_in_no_ones_way() -> None:
    async with engine() as one:
        exchange = Exchange("GET", "/debug/steps", parts=[b" " * (1 << 16)] * 100)
        serving = asyncio.create_task(exchange.run(asgi_app(one)))
        await until(exchange.incoming.empty)
        exchange.leave()
        await serving
        assert exchange.status == 200
        assert not exchange.complete
        await no_tasks()


async def test_a_client_that_leaves_without_reading_its_refusal_is_noticed() -> None:
    """Although nobody reads the rest of its body, behind which the disconnect is."""
    async with engine() as one:
        exchange = Exchange("POST", "/v1/completions", parts=[b" " * (1 << 16)] * 100)
        exchange.reading.clear()
        exchange.leave()
        await exchange.run(asgi_app(one, ServerConfig(max_body_mib=1)))
        assert exchange.events == []
        await no_tasks()


async def test_a_middleware_may_repeat_the_body() -> None:
    async with engine() as one:
        exchange = Exchange("POST", "/v1/chat/completions", CHAT)
        message = await exchange.receive()

        async def receive() -> Any:
            return message

        await asgi_app(one)(exchange.scope, receive, exchange.send)
        assert exchange.status == 200
        await no_tasks()


async def test_a_body_that_does_not_come_is_a_408() -> None:
    async with engine() as one:
        exchange = Exchange("POST", "/v1/completions", parts=[b"{"])
        await exchange.run(asgi_app(one, ServerConfig(body_timeout=0.01)))
        assert exchange.status == 408
        assert exchange.headers["connection"] == "close"


@pytest.mark.parametrize("version", ["1.0", "1.1", "2", "3"])
async def test_connections_and_framing_are_the_servers(version: str) -> None:
    async with engine() as one:
        app = asgi_app(one)
        streamed = Exchange("POST", "/v1/chat/completions", {**CHAT, "stream": True}, http_version=version)
        await streamed.run(app)
        assert streamed.body.endswith(b"data: [DONE]\n\n")
        assert streamed.complete
        assert not HOP_BY_HOP & streamed.headers.keys()
        refused = Exchange("POST", "/v1/completions", parts=[b"{"], http_version=version)
        await refused.run(asgi_app(one, ServerConfig(body_timeout=0.01)))
        # A version with streams in a connection has no such header.
        assert ("connection" in refused.headers) == (version == "1.1")


# -- clients -------------------------------------------------------------------------------------------


@rest(SECONDS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_client_that_leaves_ends_its_request_within_two_steps(
    stream: bool, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aioinfer.access")
    async with engine(ENDLESS, overlap_steps=1) as one:
        async with uvicorned(asgi_app(one, ServerConfig(access_log=True)), lifespan="off") as port:
            body = {**CHAT, "max_tokens": 3000, "stream": stream}
            async with aiohttp.ClientSession() as session, asyncio.timeout(60):
                url = f"http://127.0.0.1:{port}{path}"
                calling = asyncio.create_task(session.post(url, json=body).__aenter__())
                await until(lambda: one.stats().decoding == 1)
                if stream:
                    response = await calling
                    await response.content.readuntil(b"x")
                    response.close()
                else:
                    calling.cancel()
            await until(lambda: not one.stats().running)
            steps = one.stats().steps
            await until(lambda: not (one.stats().pages_private or one.stats().pages_fenced))
            assert one.stats().steps <= steps + 2
            assert one.stats().output_tokens < 3000
        (line,) = [each.getMessage() for each in caplog.records if each.name == "aioinfer.access"]
        assert 'finish_reason="disconnect"' in line
        assert stream or " 499 " in line
    assert not errors(caplog)
    await no_tasks()


async def test_a_client_that_leaves_while_its_body_is_read_leaves_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with engine() as one:
        exchange = Exchange("POST", "/v1/completions", parts=[b"{"])
        exchange.leave()
        await exchange.run(asgi_app(one))
        assert [each.get("status") for each in exchange.events] == [499, None]
        assert not one.requests
        await no_tasks()
    assert not errors(caplog)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_may_say_by_an_error_that_the_client_has_left(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with engine(Answer("xyz" * 9, pace=0.001)) as one:
        exchange = Exchange("POST", "/v1/chat/completions", {**CHAT, "stream": stream})

        async def send(event: Any) -> None:
            if event["type"] == "http.response.body":
                raise BrokenPipeError
            await exchange.send(event)

        await asgi_app(one)(exchange.scope, exchange.receive, send)
        assert not one.stats().running
        await no_tasks()
    assert not errors(caplog)


async def test_an_error_of_receive_ends_the_request_and_is_the_servers() -> None:
    async with engine(ENDLESS) as one:
        exchange = Exchange("POST", "/v1/chat/completions", CHAT)

        async def receive() -> Any:
            if exchange.incoming.empty():
                await until(lambda: bool(one.stats().running))
                raise KeyError("receive")
            return await exchange.receive()

        with pytest.raises(KeyError, match="receive"):
            await asgi_app(one)(exchange.scope, receive, exchange.send)
        assert not one.stats().running
        await no_tasks()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_server_that_cancels_ends_the_request(stream: bool) -> None:
    async with engine(ENDLESS) as one:
        exchange = Exchange("POST", "/v1/chat/completions", {**CHAT, "stream": stream})
        serving = asyncio.create_task(exchange.run(asgi_app(one)))
        await until(lambda: one.stats().output_tokens > 3)
        serving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await serving
        assert not one.stats().running
        await no_tasks()


async def test_a_disconnect_behind_the_last_event_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Some servers tell of it before ``send`` returns."""
    caplog.set_level(logging.INFO, "aioinfer.access")
    async with engine() as one:
        exchange = Exchange("POST", "/v1/chat/completions", CHAT)

        async def send(event: Any) -> None:
            await exchange.send(event)
            if exchange.complete:
                exchange.leave()
                for _ in range(5):
                    await asyncio.sleep(0)

        await asgi_app(one, ServerConfig(access_log=True))(exchange.scope, exchange.receive, send)
        (line,) = [each.getMessage() for each in caplog.records if each.name == "aioinfer.access"]
        assert '"POST /v1/chat/completions HTTP/1.1" 200 ' in line


@rest(SECONDS)
async def test_a_client_that_does_not_read_is_waited_for_and_its_request_parked() -> None:
    async with engine("x" * 5000, max_lag=32) as one:
        exchange = Exchange("POST", "/v1/chat/completions", {**CHAT, "stream": True})
        app = asgi_app(one)
        exchange.reading.clear()
        serving = asyncio.create_task(exchange.run(app))
        await until(lambda: one.stats().output_tokens >= 32)
        before = -1
        while before != (before := one.stats().output_tokens):
            for _ in range(50):
                await asyncio.sleep(0)
        assert before < 100
        assert exchange.events == []
        exchange.reading.set()
        await serving
        assert exchange.body.count(b"x") >= 5000


@rest(SECONDS)
async def test_a_client_that_reads_nothing_for_long_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    async with engine("x" * 5000) as one:
        for stream in (True, False):
            exchange = Exchange(
                "POST", "/v1/completions", {**PROMPT, "max_tokens": 5000, "stream": stream, "n": 8}
            )
            app = asgi_app(one, ServerConfig(send_timeout=0.05))

            async def send(event: Any, exchange: Exchange = exchange) -> None:
                await exchange.send(event)
                if len(exchange.events) == 2:
                    await asyncio.Event().wait()

            async with asyncio.timeout(60):
                await app(exchange.scope, exchange.receive, send)
            assert not exchange.complete
            await until(lambda: not one.stats().running)
        await no_tasks()
    assert not errors(caplog)


async def test_silence_is_broken_by_pings() -> None:
    async with engine(Answer("Hello!", delay=600.0)) as one:
        exchange = Exchange("POST", "/v1/chat/completions", {**CHAT, "stream": True})
        serving = asyncio.create_task(exchange.run(asgi_app(one, ServerConfig(ping_interval=0.01))))
        await until(lambda: exchange.body.count(b": ping\n\n") == 3)
        exchange.leave()
        await serving
        await no_tasks()
