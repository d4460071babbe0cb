"""Plain streams, which are written without a task per token, say what all others say."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import struct
import sys
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest

from aioinfer.server import express
from aioinfer.server.express import ExpressLane, ExpressOutlet
from aioinfer.server.openai.wires import OpenAIAnswer
from aioinfer.server.wire import PlainEvent
from tests.engine.conftest import Gate
from tests.server.conftest import Served, Serving
from tests.server.raw import request as raw_request
from tests.server.test_adversity import ENDLESS, PATH, idle, slow, until
from tests.tiers import SECONDS, grid, rest, scaled

CHAT = [{"role": "user", "content": "Hello there"}]


@pytest.fixture
def outlets(monkeypatch: pytest.MonkeyPatch) -> list[ExpressOutlet]:
    """Every stream that was written by express."""
    made: list[ExpressOutlet] = []

    def outlet(self: ExpressLane, *given: Any) -> ExpressOutlet | None:
        found = original(self, *given)
        if found is not None:
            made.append(found)
        return found

    original = ExpressLane.outlet
    monkeypatch.setattr(ExpressLane, "outlet", outlet)
    return made


def events(text: str) -> list[Any]:
    """The events of an answer, which ends with [DONE]."""
    blocks = [block for block in text.split("\n\n") if not block.startswith(":")]
    assert blocks[-2:] == ["data: [DONE]", ""], text[-300:]
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]


def joined(found: list[Any], n: int) -> list[tuple[str, str]]:
    """Text and finish reason of every choice. Nothing follows a finish reason."""
    texts, reasons = [""] * n, [""] * n
    for event in found:
        for choice in event["choices"]:
            index = choice["index"]
            assert not reasons[index]
            delta = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            texts[index] += delta
            reasons[index] = choice["finish_reason"] or ""
    return list(zip(texts, reasons, strict=True))


def whole(answer: Any) -> list[tuple[str, str]]:
    return [
        (choice["text"] if "text" in choice else choice["message"]["content"], choice["finish_reason"])
        for choice in answer["choices"]
    ]


def dechunked(response: bytes) -> str:
    """The body of a response in chunks, all of which are there."""
    body: list[bytes] = []
    at = response.index(b"\r\n\r\n") + 4
    while True:
        end = response.index(b"\r\n", at)
        size = int(response[at:end], 16)
        at = end + 2 + size
        assert response[at : at + 2] == b"\r\n"
        if not size:
            return b"".join(body).decode()
        body.append(response[end + 2 : at])
        at += 2


def read_to_end(client: socket.socket) -> bytes:
    """A response in chunks."""
    response = bytearray()
    while not response.endswith(b"\r\n0\r\n\r\n"):
        part = client.recv(1 << 20)
        assert part
        response += part
    return bytes(response)


def request_of(**body: Any) -> bytes:
    return raw_request("POST", PATH, {**ENDLESS, **body})


async def stalled_client(served: Served, **body: Any) -> socket.socket:
    """A client that has asked, with a tiny buffer, and reads nothing."""
    stalled = socket.socket()
    stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.to_thread(stalled.connect, ("127.0.0.1", served.port))
    await asyncio.to_thread(stalled.sendall, request_of(**body))
    return stalled


# -- the text law --------------------------------------------------------------------------------------


def call_of(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A random request without what makes a stream other than plain."""
    body: dict[str, Any] = {
        "model": "toy",
        "max_tokens": rng.choice([1, 2, 7, 40, 150]),
        "temperature": rng.choice([0, 1]),
        "seed": rng.randrange(1000),
        "ignore_eos": rng.random() < 0.7,
        "n": rng.choice([1, 1, 1, 3]),
    }
    if rng.random() < 0.4:
        body["stop"] = ["".join(rng.choices("abcäöüß", k=rng.randint(1, 3))) for _ in range(3)]
        body["include_stop_str_in_output"] = rng.random() < 0.3
    if rng.random() < 0.1:
        body["stop_regex"] = "[äöü][abc]"
    if rng.random() < 0.5:
        return "chat/completions", {**body, "messages": CHAT}
    echo = {"echo": True} if rng.random() < 0.2 else {}
    return "completions", {**body, "prompt": [rng.randrange(1, 64) for _ in range(5)], **echo}


@rest(SECONDS)
async def test_streams_say_what_whole_answers_say(serving: Serving, outlets: list[ExpressOutlet]) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    calls = [call_of(rng) for _ in range(scaled(300))]
    async with serving() as served:

        async def compare(path: str, body: dict[str, Any]) -> None:
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            at_once = (await served.post(f"/v1/{path}", body)).json()
            found = events((await served.post(f"/v1/{path}", streamed)).text)
            assert joined(found, body["n"]) == whole(at_once), f"seed {seed}"
            usage = found[-1]["usage"]
            assert all(event["usage"] is None for event in found[:-1])
            for name in ("prompt_tokens", "completion_tokens"):
                assert usage[name] == at_once["usage"][name]

        for start in range(0, len(calls), 50):
            await asyncio.gather(*[compare(*call) for call in calls[start : start + 50]])
        assert len(outlets) == sum(body["n"] for _, body in calls)
        await until(lambda: idle(served))
        await until(lambda: served.engine.stats().pages_in_use == 0)


async def test_events_are_those_of_the_ordinary_path_but_for_their_text(
    serving: Serving, outlets: list[ExpressOutlet], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = {**ENDLESS, "max_tokens": 40, "request_id": "same", "stream_options": {"include_usage": True}}
    chat = {name: value for name, value in plain.items() if name != "prompt"} | {"messages": CHAT}
    answers = []
    async with serving(prefix_cache=False) as served:
        for path, asked in (("completions", plain), ("chat/completions", chat)):
            for express_too in (True, False):
                with monkeypatch.context() as patch:
                    if not express_too:
                        patch.setattr(OpenAIAnswer, "plain", lambda self, index: None)
                    found = events((await served.post(f"/v1/{path}", asked)).text)
                texts = joined(found, 1)
                for event in found:
                    event.pop("created")
                    for choice in event["choices"]:
                        choice.pop("text", None)
                        choice.get("delta", {}).pop("content", None)
                kinds = [json.dumps(event) for event in found]
                answers.append((texts, [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]))
    assert answers[0] == answers[1]
    assert answers[2] == answers[3]
    assert len(outlets) == 2


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": 1},
        {"stream_options": {"continuous_usage_stats": True}},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
    ids=["logprobs", "continuous usage", "tools"],
)
async def test_other_streams_are_written_chunk_by_chunk(
    serving: Serving, outlets: list[ExpressOutlet], more: dict[str, Any]
) -> None:
    path, body = PATH, {**ENDLESS, "max_tokens": 5, **more}
    if "tools" in more:
        path, body["messages"] = "/v1/chat/completions", CHAT
        del body["prompt"]
    async with serving(tool_call_parser="hermes") as served:
        assert joined(events((await served.post(path, body)).text), 1)[0][1] == "length"
    assert outlets == []


async def test_a_client_of_http_1_0_gets_the_same_text(
    serving: Serving, outlets: list[ExpressOutlet]
) -> None:
    async with serving() as served:
        answers = []
        for version in (b"1.1", b"1.0"):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            begin = b"HTTP/" + version + b"\r\nConnection: close\r\n"
            writer.write(request_of(max_tokens=40).replace(b"HTTP/1.1\r\n", begin, 1))
            response = await reader.read()
            writer.close()
            chunked = version == b"1.1"
            text = dechunked(response) if chunked else response.partition(b"\r\n\r\n")[2].decode()
            answers.append(joined(events(text), 1))
    assert answers[0] == answers[1]
    assert len(outlets) == 1


# -- clients -------------------------------------------------------------------------------------------


@rest(SECONDS)
@pytest.mark.parametrize("max_lag", grid([64], [None]))
async def test_a_client_that_reads_nothing_and_then_all_gets_all(
    serving: Serving, outlets: list[ExpressOutlet], max_lag: int | None
) -> None:
    n, length = 24, 1000
    async with serving(num_pages=16384, max_lag=max_lag) as served:
        stalled = await stalled_client(served, max_tokens=length, n=n)
        await until(lambda: any(outlet.cell.blocked for outlet in outlets))
        # Others are not disturbed.
        other = await served.post(PATH, {**ENDLESS, "max_tokens": 50})
        ((alone, _),) = joined(events(other.text), 1)
        cells = [outlet.cell for outlet in outlets[:n]]
        if max_lag is None:
            await until(lambda: all(cell.output.ended for cell in cells))
        else:
            await until(lambda: all(cell.parked for cell in cells))
            assert not any(cell.output.ended for cell in cells)
        unsent = [outlet.transport.get_write_buffer_size() for outlet in outlets[:1]]
        assert max(unsent) < (1 << 16) + (1 << 12) * 8
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
        response = await asyncio.to_thread(read_to_end, stalled)
        found = events(dechunked(response))
        text = joined(found, n)[0][0]
        assert joined(found, n) == [(text, "length")] * n
        assert text.startswith(alone)
        assert len(found) < n * length, "what was not read was put together"
        stalled.close()
        await until(lambda: idle(served))


@rest(SECONDS)
async def test_clients_that_leave_in_any_way_give_everything_back(
    serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    seed = random.randrange(1 << 32)
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    async with serving(fault=slow, max_running_requests=64) as served:
        staying = asyncio.create_task(served.post(PATH, {**ENDLESS, "max_tokens": 200}))

        async def leave(how: str) -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(request_of())
            await reader.readexactly(rng.choice([1, 300, 2000, 9000]))
            if how == "reset":
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            elif how == "half":
                writer.write_eof()
                await reader.read()  # the server closes, too
            writer.close()

        await asyncio.gather(*[leave(how) for how in ("reset", "close", "half") * scaled(10)])
        assert joined(events((await staying).text), 1)[0][1] == "length"
        await until(lambda: idle(served))
        await until(lambda: served.engine.stats().pages_in_use == 0)
    logged = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert logged == [], f"seed {seed}"


@rest(SECONDS)
async def test_pings_are_sent_before_the_first_token_and_in_later_silence(
    serving: Serving, outlets: list[ExpressOutlet], gate: Gate
) -> None:
    async with (
        serving(server={"ping_interval": 0.05}, fault=gate) as served,
        served.http.session.post(PATH, json={**ENDLESS, "max_tokens": 20}) as response,
        asyncio.timeout(60),
    ):
        lines: list[bytes] = []
        while lines.count(b": ping\n") < 2:
            lines.append(await response.content.readline())
        assert lines[0].startswith(b":"), "headers and a first byte leave before the first token"
        assert not any(line.startswith(b"data:") for line in lines)
        gate.step(6)
        while b"data:" not in await response.content.readline():
            pass
        pings = 0
        while pings < 3:
            pings += await response.content.readline() == b": ping\n"
        gate.release()
        assert (await response.text()).endswith("data: [DONE]\n\n")
    assert len(outlets) == 1


@rest(SECONDS)
async def test_a_client_that_never_reads_is_dropped(serving: Serving, outlets: list[ExpressOutlet]) -> None:
    async with serving(server={"send_timeout": 0.3}, max_lag=64, num_pages=8192) as served:
        stalled = await stalled_client(served, n=32)
        await until(lambda: len(outlets) == 32)
        # The engine does not wait for it: others are answered.
        assert (await served.post(PATH, {**ENDLESS, "max_tokens": 5})).status == 200
        await until(lambda: idle(served))
        assert "abort" in {outlet.cell.output.finish_reason for outlet in outlets}
        stalled.close()


@rest(SECONDS)
async def test_a_row_that_cannot_be_written_ends_alone(
    serving: Serving, outlets: list[ExpressOutlet], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(fault=slow) as served:

        async def ask(number: int) -> str:
            return (await served.post(PATH, {**ENDLESS, "max_tokens": 100, "prompt": [number, 2]})).text

        asking = [asyncio.create_task(ask(number)) for number in range(1, 4)]
        await until(lambda: len(outlets) == 3)
        broken: Any = outlets[1]
        broken.after = None  # a TypeError at the next frame
        broken.size = "none"
        answers = await asyncio.gather(*asking, return_exceptions=True)
        assert sum(isinstance(answer, aiohttp.ClientError) for answer in answers) == 1
        assert sum(isinstance(answer, str) and answer.endswith("[DONE]\n\n") for answer in answers) == 2
        await until(lambda: idle(served))
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert record.exc_info[0] is TypeError


async def test_the_access_log_counts_all_bytes(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aioinfer.access")
    async with serving(server={"access_log": True}) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request_of(max_tokens=40))
        response = await reader.readuntil(b"\r\n0\r\n\r\n")
        writer.close()
        await until(lambda: any(each.name == "aioinfer.access" for each in caplog.records))
        (line,) = [each.getMessage() for each in caplog.records if each.name == "aioinfer.access"]
        assert f" 200 {len(response)} " in line


# -- the lane ------------------------------------------------------------------------------------------


class FakeTransport:
    def __init__(self, written: list[Any]) -> None:
        self.written = written
        self.unsent = 0

    def write(self, data: bytes) -> None:
        self.written.append((self, data))

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        raise AssertionError("nothing fails here")


class FakeEvents:
    def __init__(self, written: list[Any]) -> None:
        self.transport = FakeTransport(written)

    def wrote(self, size: int, now: float) -> None:
        """The bytes of a frame are counted elsewhere."""


def fake_outlet(lane: ExpressLane, written: list[Any]) -> ExpressOutlet:
    output = SimpleNamespace(has_text=True, pieces=[], token_times=[])
    cell = SimpleNamespace(
        output=output, taken_pieces=0, taken_ids=0, outlet=None, blocked=False, parked=False
    )
    stream: Any = SimpleNamespace(cell=cell)
    outlet = lane.outlet(stream, PlainEvent('{"t":', "}", "delta"), FakeEvents(written))
    cell.outlet = outlet
    return outlet


def push(outlet: ExpressOutlet, *pieces: str) -> None:
    outlet.cell.output.pieces.extend(pieces)
    outlet.cell.output.token_times.extend(0.0 for _ in pieces)


async def test_many_frames_are_written_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express, "_SLICE", 0.0)
    lane, written = ExpressLane(), []
    outlets = [fake_outlet(lane, written) for _ in range(1000)]
    for outlet in outlets:
        push(outlet, "a")
    lane.moved(outlets)
    counts = []
    while len(written) < 1000:
        await asyncio.sleep(0)
        counts.append(len(written))
        for outlet in outlets[:5]:  # those that move again come behind the others
            push(outlet, "b")
        lane.moved(outlets[:5])
    assert len(counts) == 1 + -(-(1000 - express._LEAST) // express._LEAST)
    order = [transport for transport, _ in written[:1000]]
    assert order == [outlet.transport for outlet in outlets]


async def test_text_of_any_length_is_cut_into_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express, "_PIECES", 10)
    lane, written = ExpressLane(), []
    outlet = fake_outlet(lane, written)
    push(outlet, *map(str, range(35)))
    lane.moved((outlet,))
    while outlet.cell.taken_pieces < 35:
        assert outlet.cell.taken_ids == 0
        await asyncio.sleep(0)
    assert outlet.cell.taken_ids == 35
    texts = [json.loads(frame.split(b"data: ")[1].split(b"\n")[0])["t"] for _, frame in written]
    assert texts == ["".join(map(str, range(at, min(at + 10, 35)))) for at in range(0, 35, 10)]


async def test_a_full_buffer_is_looked_at_again_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(express, "_RETRY", 0.001)
    lane, written = ExpressLane(), []
    outlet = fake_outlet(lane, written)
    transport: Any = outlet.transport
    transport.unsent = (1 << 16) + 1
    push(outlet, "a")
    lane.moved((outlet,))
    async with asyncio.timeout(60):
        while not outlet.cell.blocked:
            await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert written == []
        transport.unsent = 1 << 16
        while not written:
            await asyncio.sleep(0.001)
    assert not outlet.cell.blocked


async def test_an_outlet_that_its_handler_took_back_writes_nothing() -> None:
    lane, written = ExpressLane(), []
    outlet = fake_outlet(lane, written)
    push(outlet, "a")
    lane.moved((outlet,))
    assert written == [], "not amid a step"
    outlet.cell.outlet = None
    await asyncio.sleep(0)
    assert written == []
    assert outlet.cell.taken_pieces == 0
