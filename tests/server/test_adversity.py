"""Clients that disconnect, stall, send malformed bodies or come while the engine drains or fails."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import web

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.scheduling.step import Step
from aioinfer.server import setup
from tests.engine.conftest import Gate
from tests.server.conftest import Served, Serving
from tests.tiers import PROGRAM, SECONDS, rest
from tests.toys import ToyDevice, ToyTokenizer

CHAT: Any = [{"role": "user", "content": "Hello there"}]
#: a long completion without an end token
ENDLESS: dict[str, Any] = {
    "model": "toy",
    "prompt": [1, 2, 3],
    "max_tokens": 4000,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


@pytest.fixture
def gate() -> Any:
    gate = Gate()
    yield gate
    gate.release()


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that other tasks establish; the timeout only ends a test that hangs."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def idle(served: Served) -> bool:
    stats = served.engine.stats()
    return stats.running == stats.waiting == stats.arriving == 0


@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_is_aborted_while_its_step_is_held(
    serving: Serving, gate: Gate, phase: str, stream: bool
) -> None:
    settings = {"max_running_requests": 1, "chunk_size": 2, "max_step_tokens": 2, "overlap_steps": 0}
    async with serving(fault=gate, **settings) as served, aiohttp.ClientSession() as session:
        url = f"{served.url}/v1/completions"
        blocker = None
        if phase == "queued":
            blocker = served.engine.generate([9], None)
            await until(lambda: served.engine.stats().running == 1)
        body = {**ENDLESS, "stream": stream, "prompt": list(range(1, 8))}
        request = asyncio.create_task(_post(session, url, body))
        steps = {"queued": 0, "prefill": 1, "decode": 6}[phase]
        gate.step(steps)
        if phase == "queued":
            await until(lambda: served.engine.stats().waiting == 1)
        else:
            await until(lambda: served.engine.stats().steps == steps + 1)
        request.cancel()
        await asyncio.wait([request])
        if phase == "queued":
            await until(lambda: served.engine.stats().waiting == 0)
        else:
            await until(lambda: served.engine.stats().running == 0)
        if blocker is not None:
            await blocker.aclose()
        gate.release()
        await until(lambda: idle(served))
        await until(lambda: served.engine.stats().pages_in_use == 0)


@pytest.mark.parametrize("held_back", [False, True])
async def test_a_client_that_disconnects_while_calls_are_parsed(
    serving: Serving, gate: Gate, held_back: bool
) -> None:
    tokenizer = ToyTokenizer(looks_up=False)
    if held_back:
        # Line breaks may belong to a call that follows, so none is sent.
        tokenizer._pieces = ["\n"] * tokenizer.vocab_size
    body = {
        **ENDLESS,
        "prompt": None,
        "messages": CHAT,
        "tools": [{"type": "function", "function": {"name": "f"}}],
    }
    formats = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    async with (
        serving(fault=gate, **formats, tokenizer=tokenizer, overlap_steps=0) as served,
        aiohttp.ClientSession() as session,
    ):
        gate.step(6)
        response = await session.post(f"{served.url}/v1/chat/completions", json=body)
        await until(lambda: served.engine.stats().steps >= 6)
        told = b""
        while b"content" not in told:
            told += await response.content.readline()
        assert b'"content":null' in told
        response.close()
        await until(lambda: served.engine.stats().running == 0)
        gate.release()
        await until(lambda: idle(served))
        await until(lambda: served.engine.stats().pages_in_use == 0)


def slow(step: Step) -> None:
    """A device with slow steps."""
    time.sleep(0.002)


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> str:
    async with session.post(url, json=body) as response:
        return await response.text()


CLIENT = """
import json, socket, sys
port, count = int(sys.argv[1]), int(sys.argv[2])
body = sys.argv[3].encode()
sockets = []
for _ in range(count):
    s = socket.create_connection(("127.0.0.1", port))
    s.sendall(b"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Type: application/json\\r\\n"
              b"Content-Length: %d\\r\\n\\r\\n" % len(body) + body)
    sockets.append(s)
for s in sockets:
    s.recv(100)
print("ready", flush=True)
while True:
    for s in sockets:
        s.recv(10000)
"""


@rest(SECONDS)
async def test_clients_killed_with_signal_9_leave_nothing_behind(serving: Serving) -> None:
    left = threading.Event()

    def until_they_left(step: Step) -> None:
        slow(step)
        if step.id > 2000:  # half of their tokens: none ends before it is aborted
            left.wait()

    async with serving(fault=until_they_left) as served:
        port = int(served.url.rsplit(":", 1)[1])
        command = [sys.executable, "-c", CLIENT, str(port), "20", json.dumps(ENDLESS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
                await until(lambda: served.engine.stats().running == 20)
            finally:
                process.kill()
        await until(lambda: served.engine.stats().running == 0)
        left.set()
        await until(lambda: idle(served))
        assert served.engine.stats().steps < ENDLESS["max_tokens"], "they were aborted, and did not end"
        async with served.client() as client:
            answer = await client.completions.create(model="toy", prompt="abc", max_tokens=3)
            assert answer.usage is not None


@rest(SECONDS)
async def test_a_client_that_stops_reading_affects_no_other(serving: Serving) -> None:
    async with serving(server={"send_timeout": 0.5, "ping_interval": 0.1}, num_pages=8192) as served:
        port = int(served.url.rsplit(":", 1)[1])
        # A tiny receive buffer, and a request for far more text than socket buffers hold.
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(stalled.connect, ("127.0.0.1", port))
        body = json.dumps({**ENDLESS, "n": 100}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        await asyncio.to_thread(stalled.sendall, head.encode() + body)
        await until(lambda: served.engine.stats().running > 0)
        async with served.client() as client:
            for _ in range(3):
                answer = await client.completions.create(
                    model="toy", prompt="abc", max_tokens=5, temperature=0
                )
                assert answer.choices[0].finish_reason
        # The engine does not wait for the client: the requests continue, and the client is dropped.
        await until(lambda: idle(served))
        stalled.close()


@rest(SECONDS)
async def test_pings_are_sent_in_silence(serving: Serving, gate: Gate) -> None:
    async with (
        serving(fault=gate, server={"ping_interval": 0.05}) as served,
        aiohttp.ClientSession() as session,
        session.post(f"{served.url}/v1/completions", json=ENDLESS) as response,
    ):
        assert response.status == 200
        assert response.headers["Content-Type"].startswith("text/event-stream")
        lines = [await response.content.readline() for _ in range(6)]
        assert lines[0].startswith(b":"), "headers and a first byte leave before the first token"
        assert lines.count(b": ping\n") >= 2


async def test_a_full_queue_is_429_with_retry_after(serving: Serving, gate: Gate) -> None:
    async with (
        serving(fault=gate, max_running_requests=1, max_queued_requests=1) as served,
        served.client() as client,
    ):
        first = asyncio.create_task(client.chat.completions.create(model="toy", messages=CHAT, max_tokens=3))
        await until(lambda: served.engine.stats().running == 1)
        second = asyncio.create_task(client.chat.completions.create(model="toy", messages=CHAT, max_tokens=3))
        await until(lambda: served.engine.stats().waiting == 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="toy", messages=CHAT)
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        gate.release()
        await asyncio.gather(first, second)


async def test_draining_is_503_while_running_streams_finish(serving: Serving, gate: Gate) -> None:
    async with serving(fault=gate) as served, served.client() as client:
        running = asyncio.create_task(
            client.chat.completions.create(model="toy", messages=CHAT, max_tokens=5, temperature=0)
        )
        await until(lambda: served.engine.stats().running == 1)
        served.stop.set()
        await until(lambda: not served.engine.ready)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="toy", messages=CHAT)
        assert caught.value.status_code == 503
        async with aiohttp.ClientSession() as session, session.get(f"{served.url}/health") as health:
            assert health.status == 503
        gate.release()
        assert (await running).choices[0].finish_reason == "length"


async def test_a_step_that_fails_ends_the_stream_with_an_error_and_without_done(serving: Serving) -> None:
    def fault(step: Step) -> None:
        if step.id == 4:
            raise RuntimeError("secret internals")

    async with serving(fault=fault) as served, aiohttp.ClientSession() as session:
        async with session.post(f"{served.url}/v1/completions", json=ENDLESS) as response:
            text = await response.text()
        events = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        # Clients that know no errors in a stream take [DONE] for the end of a whole answer.
        assert "[DONE]" not in events
        assert json.loads(events[-1])["error"]["type"] == "server_error"
        assert sum("error" in event for event in events) == 1
        assert "secret" not in text
        # the openai client raises it
        async with served.client() as client:
            answer = await client.completions.create(model="toy", prompt="a", max_tokens=3)
            assert answer.choices[0].text


async def test_a_device_that_hangs_turns_health_to_503(serving: Serving, gate: Gate) -> None:
    async with (
        serving(fault=gate, server={"stall_timeout": 60.0}) as served,
        aiohttp.ClientSession() as session,
    ):

        async def health() -> tuple[int, str]:
            async with session.get(f"{served.url}/health") as response:
                return response.status, (await response.json())["status"]

        def set_back_by_a_minute() -> None:
            driver: Any = served.engine._started().driver
            driver._last_progress -= 61

        # An engine that was idle for longer is not stalled, neither before nor after its next request.
        set_back_by_a_minute()
        assert await health() == (200, "ok")
        stream = served.engine.generate([1, 2], None)
        await until(lambda: served.engine.stats().running == 1)
        assert await health() == (200, "ok")
        set_back_by_a_minute()
        assert await health() == (503, "stalled")
        gate.release()
        await stream
        assert await health() == (200, "ok")


async def test_a_lost_device_turns_health_to_503(serving: Serving) -> None:
    async with serving() as served, served.client() as client:
        served.device.lost = True

        def fault(step: Step) -> None:
            raise RuntimeError("gone")

        served.device.fault = fault
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="toy", messages=CHAT)
        assert caught.value.status_code == 503
        async with aiohttp.ClientSession() as session, session.get(f"{served.url}/health") as health:
            assert health.status == 503


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'{"prompt": "a", "temperature": NaN}', 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": {"a": 1}}', 400),
        (b'{"prompt": []}', 400),
        (b'{"prompt": [[]]}', 400),
        (b'{"prompt": [-1]}', 400),
        (b'{"prompt": "a", "stream": "yes"}', 400),
        (b'{"prompt": "a", "stop": 5}', 400),
        (b'{"prompt": "a", "stop": [5]}', 400),
        (b'{"prompt": "a", "seed": 1e400}', 400),
        (b'{"prompt": "a", "max_tokens": 1.5}', 400),
        (b'{"prompt": "a", "temperature": 1%s}' % (b"0" * 400), 400),
        (b'{"prompt": "a", "logit_bias": {"5": 1%s}}' % (b"0" * 400), 400),
        (b'{"prompt": "a", "allowed_token_ids": 5}', 400),
        (b'{"prompt": "a", "stop_token_ids": true}', 400),
        (b"\xff\xfe", 400),
        (b" " * 600_000, 413),
    ],
)
async def test_malformed_bodies_are_a_400(serving: Serving, body: bytes, status: int) -> None:
    fresh = aiohttp.TCPConnector(force_close=True)
    async with (
        serving(server={"max_body_mib": 0.5}) as served,
        aiohttp.ClientSession(connector=fresh) as session,
    ):
        headers = {"Content-Type": "application/json"}
        async with session.post(f"{served.url}/v1/completions", data=body, headers=headers) as response:
            assert response.status == status
            assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        async with session.post(f"{served.url}/v1/chat/completions", data=body, headers=headers) as response:
            assert response.status == status


async def test_unknown_routes_and_methods_are_json_errors(serving: Serving) -> None:
    async with serving() as served, aiohttp.ClientSession() as session:
        for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
            async with session.request(method, served.url + path) as response:
                assert response.status == status
                assert "error" in await response.json()


async def test_the_api_key_guards_every_route_but_health(serving: Serving) -> None:
    async with serving(server={"api_key": "schlüssel"}) as served, aiohttp.ClientSession() as session:
        for key in (None, "wrong", "schlüsse", "schlüssell", "\udcff"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            for method, path in (
                ("GET", "/v1/models"),
                ("GET", "/v1/models/toy"),
                ("POST", "/v1/completions"),
                ("POST", "/v1/chat/completions"),
            ):
                try:
                    async with session.request(method, served.url + path, headers=headers) as response:
                        assert response.status == 401
                except UnicodeEncodeError:
                    assert key == "\udcff"
        async with session.get(f"{served.url}/health") as response:
            assert response.status == 200
        good = {"Authorization": "Bearer schlüssel"}
        async with session.get(f"{served.url}/v1/models", headers=good) as response:
            assert response.status == 200


@rest(SECONDS)
async def test_the_routes_can_be_mounted_in_an_existing_application() -> None:
    """Disconnects are detected without handler cancellation, too."""
    config = EngineConfig(model="toy", page_size=4, num_pages=2048)
    device = ToyDevice(num_pages=2048, num_slots=config.num_slots)
    device.fault = slow
    engine = Engine(config, launcher=lambda _: ThreadLauncher(device), tokenizer=lambda _: ToyTokenizer())
    app = web.Application()

    async def own(request: web.Request) -> web.Response:
        return web.Response(text="mine")

    app.router.add_get("/", own)
    setup(app, engine, prefix="/llm/v1")
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as session:
            async with session.get(url) as response:
                assert await response.text() == "mine"
            for stream in (True, False):
                leaving = asyncio.create_task(
                    _post(session, f"{url}/llm/v1/completions", {**ENDLESS, "stream": stream})
                )
                await until(lambda: engine.stats().running == 1)
                leaving.cancel()
                await asyncio.wait([leaving])
                await until(lambda: engine.stats().running == 0)
    finally:
        await runner.cleanup()
    assert not engine.ready


@rest(PROGRAM)
async def test_sigterm_drains_and_exits_cleanly() -> None:
    """The real command line with the bundled model, during a stream."""
    command = [sys.executable, "-u", "-m", "aioinfer", "serve", "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            url = await asyncio.to_thread(_served_url, process)
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
                stream = await client.chat.completions.create(
                    model="tiny-chat",
                    messages=[{"role": "user", "content": "Write a long story about Mira."}],
                    stream=True,
                )
                chunks = []
                async for chunk in stream:
                    if not chunks:
                        process.send_signal(signal.SIGTERM)
                    chunks.append(chunk)
            _, stderr = await asyncio.to_thread(process.communicate, timeout=240)
        finally:
            process.kill()
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert process.returncode == 0, stderr
    assert stderr == b""


def _served_url(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(b"Serving on"):
            return line.split()[2].decode()
    raise AssertionError("the server ended before it served")


@rest(SECONDS)
async def test_a_request_of_many_choices_lets_others_go_between(serving: Serving) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    async with serving(max_running_requests=1) as served, aiohttp.ClientSession() as session:
        url = f"{served.url}/v1/completions"
        many = asyncio.create_task(session.post(url, json={**body, "n": 64}))
        while served.engine.stats().waiting < 32:
            await asyncio.sleep(0)
        async with session.post(url, json=body) as response:
            assert response.status == 200
            alone = (await response.json())["choices"][0]["text"]
        assert not many.done()
        async with await many as response:
            assert [choice["text"] for choice in (await response.json())["choices"]] == [alone] * 64


@rest(SECONDS)
async def test_an_unexpected_error_is_a_500_without_details_and_a_log_line(
    serving: Serving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a secret of the engine")

    async with serving() as served:
        monkeypatch.setattr(Engine, "generate", broken)
        async with served.client() as client:
            with pytest.raises(openai.InternalServerError) as caught:
                await client.chat.completions.create(model="toy", messages=CHAT)
    assert "secret" not in str(caught.value)
    [record] = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
