"""EventStream: pings, and clients that do not read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from aioinfer.server.http.disconnects import ClientGone, Watcher
from aioinfer.server.http.sse import EventStream


class Transport:
    """Keeps what is written until the test reads it."""

    def __init__(self) -> None:
        self.aborted = False
        self.written = b""
        self.unread = 0

    def write(self, data: bytes) -> None:
        self.written += data
        self.unread += len(data)

    def is_closing(self) -> bool:
        return self.aborted

    def abort(self) -> None:
        self.aborted = True

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str) -> None:
        """It has no socket."""


class Response:
    """Writes chunks and waits, as aiohttp does, while more than 100 bytes are unread."""

    prepared = True
    headers: dict[str, str]

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.headers = {"Transfer-Encoding": "chunked"}
        self.reads = asyncio.Event()

    async def prepare(self, request: Any) -> None:
        """Without headers."""

    async def write(self, data: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        while self.transport.unread > 100:
            self.reads.clear()
            await self.reads.wait()

    write_eof = write

    def read(self, count: int) -> None:
        self.transport.unread -= count
        self.reads.set()


Opened = tuple[EventStream, Response, Transport, Callable[[float], None]]


async def opened(ping_interval: float = 5.0, send_timeout: float = 30.0) -> Opened:
    """An open stream, and what looks at it after so many seconds."""
    transport = Transport()
    request: Any = SimpleNamespace(transport=transport, writer=None)
    events = EventStream(request, Watcher(), ping_interval=ping_interval, send_timeout=send_timeout)
    response = Response(transport)
    events.response = response
    clock = 0.0

    def look(seconds: float) -> None:
        nonlocal clock
        clock += seconds
        events.look(clock)

    events._time = lambda: clock
    await events.open()
    return events, response, transport, look


async def ended(task: asyncio.Task[None]) -> BaseException | None:
    await asyncio.wait([task])
    return task.exception()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("direct", [False, True])
async def test_a_client_that_does_not_read_is_dropped_and_not_pinged(last: bool, direct: bool) -> None:
    events, _, transport, look = await opened()

    async def write() -> None:
        async with events:
            if direct:
                transport.write(b"x" * 200)
                events.wrote(200, 0.0)
                await asyncio.Event().wait()
            await (events.end("x" * 200) if last else events.send("x" * 200))

    writing = asyncio.create_task(write())
    await asyncio.sleep(0)
    before = transport.written
    for _ in range(5):
        look(5.0)
    assert not transport.aborted
    look(5.0)
    assert transport.aborted
    assert transport.written == before
    error = await ended(writing)
    assert isinstance(error, ClientGone)
    assert "has not read for 30 s" in str(error)


async def test_a_client_that_reads_a_little_of_much_is_kept() -> None:
    events, response, transport, look = await opened()
    response.read(transport.unread)

    async def write() -> None:
        async with events:
            for _ in range(10):
                await events.send("x" * 150)

    writing = asyncio.create_task(write())
    for _ in range(40):
        await asyncio.sleep(0)
        look(29.0)
        response.read(min(60, transport.unread))
    assert not transport.aborted
    assert await ended(writing) is None


async def test_bytes_that_are_added_while_others_are_read_do_not_hide_the_reading() -> None:
    events, response, transport, look = await opened()
    for _ in range(10):
        transport.write(b"x" * 50)
        events.wrote(50, 0.0)
        look(20.0)
        response.read(40)  # the buffer only grows
    assert not transport.aborted


async def test_pings_are_sent_in_silence_only() -> None:
    events, response, transport, look = await opened(ping_interval=5.0)
    response.read(transport.unread)
    start = len(transport.written)
    look(4.9)
    await events.send("a")
    response.read(transport.unread)
    look(4.9)
    assert b"ping" not in transport.written
    look(0.2)
    assert transport.written[start:].endswith(b"8\r\n: ping\n\n\r\n")
    # One that was not read is the last one.
    for _ in range(7):
        look(5.0)
    assert transport.written.count(b"ping") == 1
    assert transport.aborted


async def test_no_ping_follows_the_end_of_a_response() -> None:
    events, response, transport, look = await opened(ping_interval=5.0)
    await events.end("[DONE]")
    response.read(transport.unread)
    look(20.0)
    assert b"ping" not in transport.written


async def test_pings_of_a_response_that_is_not_chunked_have_no_frame() -> None:
    events, response, transport, look = await opened(ping_interval=5.0)
    response.headers.clear()
    await events.open()
    response.read(transport.unread)
    assert events.transport is None
    look(10.0)
    assert transport.written.endswith(b"\n\n\r\n: ping\n\n")
