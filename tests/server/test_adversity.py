"""Clients that disconnect, stall, send malformed bodies or come while the engine drains or fails."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from aioinfer.engine import Engine
from aioinfer.scheduling.step import Step
from tests.engine.conftest import Gate
from tests.server.conftest import Served, Serving
from tests.tiers import PROGRAM, SECONDS, rest

PATH = "/v1/completions"
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
    async with serving(fault=gate, **settings) as served:
        blocker = None
        if phase == "queued":
            blocker = served.engine.generate([9], None)
            await until(lambda: served.engine.stats().running == 1)
        # With logprobs, a task of its own writes the stream.
        body = {**ENDLESS, "stream": stream, "prompt": [*range(1, 8)], "logprobs": 1}
        request = asyncio.create_task(served.post(PATH, body))
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


def slow(step: Step) -> None:
    """A device with slow steps."""
    time.sleep(0.002)


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
        command = [sys.executable, "-c", CLIENT, str(served.port), "20", json.dumps(ENDLESS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            try:
                assert await asyncio.to_thread(process.stdout.readline) == b"ready\n"
                await until(lambda: served.engine.stats().running == 20)
            finally:
                process.kill()
        await until(lambda: served.engine.stats().running == 0)
        left.set()
        await until(lambda: idle(served))
        assert served.engine.stats().steps < ENDLESS["max_tokens"], "they were aborted, and did not end"
        async with served.client() as client:
            await client.completions.create(model="toy", prompt="abc", max_tokens=3)


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
    async with serving(fault=gate) as served:
        running = asyncio.create_task(served.post(PATH, {**ENDLESS, "max_tokens": 5, "stream": False}))
        await until(lambda: served.engine.stats().running == 1)
        served.running.stop.set()
        await until(lambda: not served.engine.ready)
        assert (await served.post(PATH, ENDLESS)).status == 503
        assert (await served.get("/health")).status == 503
        gate.release()
        assert (await running).json()["choices"][0]["finish_reason"] == "length"


async def test_a_step_that_fails_ends_the_stream_with_an_error_and_without_done(serving: Serving) -> None:
    def fault(step: Step) -> None:
        if step.id == 4:
            raise RuntimeError("secret internals")

    async with serving(fault=fault) as served:
        reply = await served.post(PATH, ENDLESS)
        # Clients that know no errors in a stream take [DONE] for the end of a whole answer.
        assert "[DONE]" not in reply.text
        events = reply.events()
        assert events[-1]["error"]["type"] == "server_error"
        assert sum("error" in event for event in events) == 1
        assert "secret" not in reply.text
        assert (await served.post(PATH, {**ENDLESS, "max_tokens": 3})).text.endswith("[DONE]\n\n")


async def test_a_device_that_hangs_turns_health_to_503(serving: Serving, gate: Gate) -> None:
    async with serving(fault=gate, server={"stall_timeout": 60.0}) as served:

        async def health() -> tuple[int, str]:
            reply = await served.get("/health")
            return reply.status, reply.json()["status"]

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
    def fault(step: Step) -> None:
        raise RuntimeError("gone")

    async with serving() as served:
        served.device.lost, served.device.fault = True, fault
        assert (await served.post("/v1/chat/completions", {"messages": CHAT})).status == 503
        assert (await served.get("/health")).status == 503


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
    async with serving(server={"max_body_mib": 0.5}) as served:
        for path in (PATH, "/v1/chat/completions"):
            reply = await served.post(path, body, Connection="close")
            assert reply.status == status
            assert set(reply.error) == {"message", "type", "param", "code"}


@rest(PROGRAM)
@pytest.mark.native
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
    for line in process.stdout:
        if line.startswith(b"Serving on"):
            return line.split()[2].decode()
    raise AssertionError("the server ended before it served")


@rest(SECONDS)
async def test_a_request_of_many_choices_lets_others_go_between(serving: Serving) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 20, "ignore_eos": True, "temperature": 0}
    async with serving(max_running_requests=1) as served:
        many = asyncio.create_task(served.post(PATH, {**body, "n": 64}))
        while served.engine.stats().waiting < 32:
            await asyncio.sleep(0)
        alone = (await served.post(PATH, body)).json()["choices"][0]["text"]
        assert not many.done()
        assert [choice["text"] for choice in (await many).json()["choices"]] == [alone] * 64


@rest(SECONDS)
async def test_an_unexpected_error_is_a_500_without_details_and_a_log_line(
    serving: Serving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a secret of the engine")

    async with serving() as served:
        monkeypatch.setattr(Engine, "generate", broken)
        reply = await served.post("/v1/chat/completions", {"messages": CHAT})
    assert (reply.status, reply.error["type"]) == (500, "server_error")
    assert "secret" not in reply.text
    [record] = [each for each in caplog.records if each.levelname == "ERROR"]
    assert record.exc_info[0] is ZeroDivisionError
