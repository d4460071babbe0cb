"""Clients that leave while nothing reads their connections, because of what they have sent."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import Any

import pytest
from aiohttp import web

from aioinfer import until_disconnected
from tests.engine.conftest import Gate
from tests.server.conftest import Connect, Serving
from tests.server.raw import errors, request
from tests.server.test_adversity import ENDLESS, until

CALL = request("POST", "/v1/completions", {**ENDLESS, "stream": False, "max_tokens": 3})
STREAM = request("POST", "/v1/completions", {**ENDLESS, "stream": True, "max_tokens": 3})
BEHIND = {
    "nothing": b"",
    "small requests": request("GET", "/livez") * 500,
    "calls": CALL * 50,
    "a request that is cut off": request("GET", "/livez") * 100 + b"GET /li",
}


def leave(writer: asyncio.StreamWriter, how: str) -> None:
    taken: Any = writer.get_extra_info("socket")
    if how == "reset":
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    if how == "half":
        writer.write_eof()
    else:
        writer.transport.abort()


@pytest.mark.parametrize("how", ["closed", "reset", "half"])
@pytest.mark.parametrize("behind", BEHIND)
async def test_who_leaves_behind_what_nobody_reads_is_noticed(
    serving: Serving, connect: Connect, gate: Gate, caplog: pytest.LogCaptureFixture, behind: str, how: str
) -> None:
    async with serving(fault=gate) as served:
        raw = await connect(served)
        raw.writer.write(CALL + BEHIND[behind])
        await until(lambda: served.engine.stats().running == 1)
        leave(raw.writer, how)
        await until(lambda: served.engine.stats().running == 0)
        gate.release()
        assert (await served.get("/health")).status == 200
    assert not errors(caplog)


async def test_who_leaves_behind_an_upgrade_with_data_is_noticed(
    serving: Serving, connect: Connect, gate: Gate
) -> None:
    async with serving(fault=gate) as served:
        raw = await connect(served)
        body = {**ENDLESS, "stream": False, "max_tokens": 3}
        upgrade = request("POST", "/v1/completions", body, Connection="Upgrade", Upgrade="websocket")
        raw.writer.write(upgrade + b"x" * 300_000)
        await until(lambda: served.engine.stats().running == 1)
        leave(raw.writer, "closed")
        await until(lambda: served.engine.stats().running == 0)
        gate.release()


async def test_who_leaves_a_stream_behind_what_nobody_reads_is_noticed(
    serving: Serving, connect: Connect, gate: Gate
) -> None:
    async with serving(fault=gate) as served:
        raw = await connect(served)
        raw.writer.write(STREAM + BEHIND["small requests"])
        await raw.head()
        await until(lambda: served.engine.stats().running == 1)
        leave(raw.writer, "reset")
        await until(lambda: served.engine.stats().running == 0)
        gate.release()


async def test_who_stays_and_has_pipelined_gets_all_answers(serving: Serving, connect: Connect) -> None:
    async with serving() as served:
        raw = await connect(served)
        raw.writer.write(CALL * 3 + request("GET", "/livez") * 100)
        assert [await raw.status() for _ in range(103)] == [200] * 103


async def test_an_application_of_aiohttp_notices_it_too(caplog: pytest.LogCaptureFixture) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async def handle(request: web.Request) -> web.Response:
        await until_disconnected(request, work())
        return web.Response()

    app = web.Application()
    app.router.add_get("/", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        _, writer = await asyncio.open_connection(*runner.addresses[0][:2])
        writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 300)
        await begun.wait()
        leave(writer, "closed")
        async with asyncio.timeout(60):
            await ended.wait()
    finally:
        await runner.cleanup()
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
