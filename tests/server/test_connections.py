"""Connections that are too many, slow, half-open or malformed, and clients that disconnect at any time."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import random
import resource
import socket
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import pytest
from aiohttp import web

from aioinfer.errors import ConfigError
from aioinfer.scheduling.step import Step
from aioinfer.server.http.connections import Connection, Connections
from aioinfer.server.http.disconnects import ClientGone, Watched, Watcher
from aioinfer.server.http.listening import connection_limit
from aioinfer.server.http.logs import Throttle
from tests.engine.conftest import Gate
from tests.server.conftest import Connect, Serving, age
from tests.server.raw import Raw, errors, request
from tests.server.test_adversity import ENDLESS, idle, until
from tests.tiers import SECONDS, rest, scaled

COMPLETION = {**ENDLESS, "stream": False, "max_tokens": 3}


@pytest.fixture
async def unhandled() -> AsyncIterator[None]:
    """Nothing reaches the loop's exception handler, exceptions that were never retrieved included."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    yield
    gc.collect()
    assert not found


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.fixture(autouse=True)
def warned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning that is throttled comes once in a test, however long that takes."""
    defaults: Any = Throttle.__init__.__kwdefaults__
    monkeypatch.setitem(defaults, "interval", math.inf)


# -- slow and idle ones --------------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: loc"])
async def test_a_connection_without_a_whole_request_is_closed(
    serving: Serving, connect: Connect, connections: list[Connections], sent: bytes
) -> None:
    async with serving(server={"header_timeout": 600.0, "idle_timeout": 600.0}) as served:
        raw = await connect(served)
        await raw.send(sent)
        await until(lambda: len(connections[0]) == 1)
        age(connections[0])
        assert await raw.closed()


async def test_the_header_timeout_is_that_of_the_config(serving: Serving, connect: Connect) -> None:
    async with serving(server={"header_timeout": 0.05, "idle_timeout": 600.0}) as served:
        assert await (await connect(served)).closed()


async def test_a_request_in_progress_and_an_idle_connection_outlive_the_header_timeout(
    serving: Serving, connect: Connect, connections: list[Connections], gate: Gate
) -> None:
    async with serving(server={"header_timeout": 600.0, "idle_timeout": 600.0}, fault=gate) as served:
        busy, idling, silent = [await connect(served) for _ in range(3)]
        await busy.send(request("POST", "/v1/completions", COMPLETION))
        await until(lambda: served.engine.stats().running == 1)
        await idling.send(request())
        assert await idling.status() == 200
        for _ in range(2):
            # The time of the others has passed, too.
            await until(lambda: len(connections[0]) == 3)
            age(connections[0])
            assert await silent.closed()
            silent = await connect(served)
        gate.release()
        assert await busy.status() == 200
        await idling.send(request())
        assert await idling.status() == 200


@pytest.mark.parametrize("begun", [b"", b"GET /hea"])
async def test_an_idle_connection_is_closed(serving: Serving, connect: Connect, begun: bytes) -> None:
    """Also one whose next request does not end."""
    async with serving(server={"header_timeout": 600.0, "idle_timeout": 0.05}) as served:
        raw = await connect(served)
        await raw.send(request() + begun)
        assert await raw.status() == 200
        assert await raw.closed()


async def test_a_body_that_does_not_arrive_is_a_408(serving: Serving, connect: Connect) -> None:
    async with serving(server={"body_timeout": 0.05}) as served:
        raw = await connect(served)
        await raw.send(request("POST", "/v1/completions", COMPLETION)[:-5])
        assert await raw.status() == 408
        await raw.close()


@rest(SECONDS)
async def test_a_client_that_does_not_read_its_whole_answer_is_dropped() -> None:
    connections = Connections(limit=8, header_timeout=600.0, send_timeout=0.1, unlimited={"/health"})

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        return web.Response(body=bytes(32 << 20))  # more than the buffers of both sides hold

    handling = web.Server(answer)
    server = await asyncio.get_running_loop().create_server(
        partial(Connection, connections, handling), "127.0.0.1", 0
    )
    with socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(stalled.connect, server.sockets[0].getsockname())
        await asyncio.to_thread(stalled.send, request())
        await until(lambda: len(connections) == 1)
        await until(lambda: len(connections) == 0)
    server.close()
    connections.stop()
    await handling.shutdown()


class Buffered(asyncio.Transport):
    """A transport with an amount of unsent data."""

    unsent = 0
    closing = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True


@pytest.mark.parametrize("closing", [False, True])
async def test_a_client_that_reads_slowly_is_not_dropped(closing: bool) -> None:
    connections = Connections(limit=8, header_timeout=600.0, send_timeout=10.0, unlimited={"/health"})
    transport: Any = Buffered()
    connection = Connection(connections, web.Server(lambda _: asyncio.sleep(0)))
    connection.connection_made(transport)
    transport.unsent, transport.closing = 1000, closing
    if not closing:
        connection.pause_writing()
    for second in range(100):
        if second % 9 == 0:
            transport.unsent -= 1
        assert not connection.stuck(second, 10.0)
    # The last byte was read at 99 seconds.
    assert not connection.stuck(108.0, 10.0)
    assert connection.stuck(109.0, 10.0)
    connection.connection_lost(None)
    connections.stop()


# -- too many ------------------------------------------------------------------------------------------


async def test_half_open_connections_never_keep_others_out(
    serving: Serving, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(server={"max_connections": 8}) as served:
        opened = [await connect(served) for _ in range(40)]
        raw = await connect(served)
        await raw.send(request("POST", "/v1/completions", COMPLETION))
        assert await raw.status() == 200
        # The oldest ones made room.
        assert all([await each.closed() for each in opened[:30]])
        for each in opened:
            await each.close()
    assert warnings(caplog) == ["8 connections are open: an idle one was closed"]


async def test_a_connection_that_has_had_a_response_makes_room_too(
    serving: Serving, connect: Connect
) -> None:
    async with serving(server={"max_connections": 3}) as served:
        kept = [await connect(served) for _ in range(3)]
        for each in reversed(kept):
            await each.send(request())
            assert await each.status() == 200
        raw = await connect(served)
        # Not the oldest connection: the one that has been idle for longest.
        assert await kept[2].closed()
        for each in (*kept[:2], raw):
            await each.send(request())
            assert await each.status() == 200


async def test_health_is_reachable_when_every_connection_has_a_request(
    serving: Serving, connect: Connect, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(server={"max_connections": 4}, fault=gate) as served:
        busy = [await connect(served) for _ in range(4)]
        for each in busy:
            await each.send(request("POST", "/v1/completions", COMPLETION))
        await until(lambda: served.engine.stats().running + served.engine.stats().waiting == 4)
        health = await connect(served)
        await health.send(request())
        assert await health.status() == 200
        refused = await connect(served)
        await refused.send(request("POST", "/v1/completions", COMPLETION))
        assert await refused.status() == 503
        assert await refused.closed()
        gate.release()
        assert [await each.status() for each in busy] == [200] * 4
        after = await connect(served)
        await after.send(request("POST", "/v1/completions", COMPLETION))
        assert await after.status() == 200
    assert len(warnings(caplog)) == 1
    assert not errors(caplog)


async def test_the_limit_of_open_files_bounds_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def limit(files: int) -> None:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))

    limit(resource.RLIM_INFINITY)
    assert connection_limit(None) == 4096
    limit(1024)
    default = connection_limit(None)
    assert 1 < default < 1024
    assert connection_limit(5) == 5
    assert not caplog.records
    assert connection_limit(5000) == default
    assert "the limit of open files is 1024" in caplog.text
    limit(33)
    with pytest.raises(ConfigError, match=r"ulimit -n 33.* at least \d+ are needed"):
        connection_limit(5)


def test_a_throttled_warning_says_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    throttle = Throttle(logging.getLogger("x"), interval=10.0, clock=lambda: now)
    for _ in range(3):
        throttle.warning("full")
    now = 10.0
    throttle.warning("full")
    now = 20.0
    throttle.warning("full")
    assert [each.getMessage() for each in caplog.records] == [
        "full",
        "full (2 more since the last message)",
        "full",
    ]


# -- malformed ones and disconnects --------------------------------------------------------------------


MALFORMED = [
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50),
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nbad header\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
    b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: \n\r\r\n" + b"\xff" * 100 + b"\r\n\r\n",
]


async def test_malformed_connections_log_one_line_in_all(
    serving: Serving, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as served:
        for data in MALFORMED * 3:
            raw = await connect(served)
            await raw.send(data)
            raw.writer.write_eof()
            assert await raw.status() in (0, 400)
            await raw.close()
        raw = await connect(served)
        await raw.send(request())
        assert await raw.status() == 200
    assert not errors(caplog)
    assert len(warnings(caplog)) <= 1
    assert all("\n" not in line and len(line) < 400 for line in warnings(caplog))


@rest(SECONDS)
@pytest.mark.usefixtures("unhandled")
async def test_clients_that_disconnect_at_any_time_are_not_logged(
    serving: Serving, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    seed = 7
    chance = random.Random(seed)

    def fault(step: Step) -> None:
        if step.id % 50 == 49:
            raise RuntimeError("a step fails now and then")

    async def leave(raw: Raw, data: bytes, turns: int) -> None:
        await raw.send(data)
        for _ in range(turns):
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            raw.writer.transport.abort()
        else:
            await raw.close()

    async with serving(fault=fault) as served:
        for number in range(scaled(300, 60)):
            stream = number % 2 == 0
            body = {**ENDLESS, "stream": stream, "n": chance.choice([1, 3]), "max_tokens": 40, "echo": True}
            data = request("POST", "/v1/completions", body)
            cut = len(data) if number % 5 else chance.randrange(len(data))
            await leave(await connect(served), data[:cut], chance.choice([0, 1, 5, 20, 100, 300]))
        await until(lambda: idle(served))
    gc.collect()
    logged = [line for line in errors(caplog) if "a step fails" not in line]
    assert [line for line in logged if "step" not in line] == [], f"seed {seed}"


class _Request:
    """A request whose connection the test closes."""

    def __init__(self) -> None:
        self.transport: Any = object.__new__(_Transport)


class _Transport:
    def is_closing(self) -> bool:
        return False


async def test_a_disconnect_ends_the_task_where_it_waits() -> None:
    watcher = Watcher(0.001)
    leaving, staying = _Request(), _Request()

    async def waits(request: Any) -> None:
        async with Watched(request, watcher):
            await asyncio.Event().wait()

    tasks = [asyncio.create_task(waits(each)) for each in (leaving, staying)]
    await asyncio.sleep(0)
    leaving.transport = None
    with pytest.raises(ClientGone):
        await tasks[0]
    assert tasks[0].cancelling() == 0
    assert not tasks[1].done()
    tasks[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert len(watcher) == 0
    assert watcher._timer is None


@pytest.mark.parametrize("also_cancelled", [False, True])
async def test_a_disconnect_hides_neither_another_error_nor_a_cancellation(also_cancelled: bool) -> None:
    watcher, leaving = Watcher(0.001), _Request()

    async def fails_when_cancelled() -> None:
        async with Watched(leaving, watcher):
            try:
                await asyncio.Event().wait()
            finally:
                if also_cancelled:
                    task.cancel()
                else:
                    raise ValueError("while it was cancelled")

    task = asyncio.create_task(fails_when_cancelled())
    await asyncio.sleep(0)
    leaving.transport = None
    with pytest.raises(asyncio.CancelledError if also_cancelled else ValueError):
        await task


async def test_one_look_that_raises_leaves_the_watcher_at_work() -> None:
    looks: list[object] = []

    class Looked(Watched):
        def look(self, now: float) -> None:
            looks.append(self)
            if self is first:
                raise ArithmeticError("on purpose")

    watcher, told = Watcher(0.001), []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
    first, second = (Looked(_Request(), watcher) for _ in range(2))
    async with first, second, asyncio.timeout(60):
        while looks.count(second) < 3:
            await asyncio.sleep(0.001)
    assert told
    assert all(isinstance(error, ArithmeticError) for error in told)


async def test_many_requests_are_looked_at_in_slices() -> None:
    class Looked(Watched):
        looks = 0

        def look(self, now: float) -> None:
            self.looks += 1
            turn[-1] += 1

    watcher, turn = Watcher(0.02), [0]
    watched = [Looked(_Request(), watcher) for _ in range(640)]
    for each in watched:
        watcher.add(each)
    async with asyncio.timeout(60):
        while min(each.looks for each in watched) < 3:
            turn.append(0)
            await asyncio.sleep(0)
    assert max(turn) <= 64
    assert max(each.looks for each in watched) <= 4
    for each in watched:
        watcher.remove(each)
