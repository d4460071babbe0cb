"""Traces of a running server: over HTTP, and with ``aioinfer trace``."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aioinfer.cli.main import main
from aioinfer.observe.timeline import Timeline
from aioinfer.params import SamplingParams
from tests.engine.simulation import settle
from tests.observe.test_timeline import by_step, check_order, read_trace
from tests.server.conftest import Connect, Served, Serving
from tests.server.raw import request


async def work(served: Served) -> None:
    await served.engine.generate([1, 2], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    await settle(served.engine)


async def trace(url: str, *options: str) -> int:
    """Run ``aioinfer trace`` in a thread: it has its own event loop."""
    return await asyncio.to_thread(main, ["trace", url, *options])


async def test_the_trace_of_a_server(serving: Serving) -> None:
    async with serving() as served:
        await work(served)
        reply = await served.get("/debug/trace")
        assert (reply.status, reply.type) == (200, "application/json")
        steps = by_step(read_trace(reply.text))
        assert len(steps) == served.engine.stats().steps >= 20
        for step in steps.values():
            check_order(step)


async def test_the_trace_requires_the_api_key(
    serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(server={"api_key": "secret"}) as served:
        file = tmp_path / "trace.json"
        assert await trace(served.url, "-o", str(file)) == 1
        assert "401" in capsys.readouterr().err
        assert not file.exists()
        assert await trace(served.url, "-o", str(file), "--key", "secret") == 0
        read_trace(file.read_text())


async def test_the_command_saves_a_trace(
    serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving() as served:
        await work(served)
        file = tmp_path / "trace.json"
        assert await trace(f"{served.url}/", "-o", str(file)) == 0
    lanes = read_trace(file.read_text())
    assert f"{sum(map(len, lanes.values()))} events in {file}" in capsys.readouterr().out
    assert all(lanes.values())


async def test_an_error_is_one_clear_line(
    serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No server, no address, another server, and an output file that cannot be written."""

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = bodies.pop()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\n" + body)
        writer.close()

    file = tmp_path / "trace.json"
    nowhere = tmp_path / "missing" / "trace.json"
    async with serving() as served:
        assert await trace(served.url, "-o", str(nowhere)) == 1
        check_line(capsys, str(nowhere))
    assert await trace(served.url, "-o", str(file)) == 1
    check_line(capsys, served.url)
    assert await trace("127.0.0.1:1", "-o", str(file)) == 1
    check_line(capsys, "127.0.0.1:1")
    bodies = [b"{}", json.dumps([1, [2]]).encode().ljust(9), b"<p>no</p>"]
    something = await asyncio.start_server(other, "127.0.0.1", 0)
    async with something:
        url = "http://{}:{}".format(*something.sockets[0].getsockname())
        while bodies:
            assert await trace(url, "-o", str(file)) == 1
            check_line(capsys, url)
    assert not file.exists()


def check_line(capsys: pytest.CaptureFixture[str], part: str) -> None:
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert part in line


async def test_one_trace_is_made_at_a_time_and_until_it_was_sent(
    serving: Serving, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()

    def held(timeline: Timeline) -> Iterator[str]:
        begun.set()
        go_on.wait()
        yield "x" * (8 << 20)
        yield "y" * (8 << 20)

    async with serving(server={"admin_port": 0}) as served:
        with monkeypatch.context() as patch:
            patch.setattr(Timeline, "trace_pieces", held)
            deaf = await connect(served)
            await deaf.send(request("GET", "/debug/trace"))
            await asyncio.to_thread(begun.wait)
            refused = await served.get("/debug/trace")
            assert (refused.status, refused.headers["Retry-After"]) == (429, "5")
            go_on.set()
            await deaf.head()
            # Not read: it is held in memory meanwhile.
            assert (await served.get("/debug/trace")).status == 429
            await deaf.close()
        while (reply := await served.get("/debug/trace")).status == 429:
            await asyncio.sleep(0.01)
        read_trace(reply.text)


async def test_a_client_that_leaves_amid_its_trace_lets_the_next_one_have_one(
    serving: Serving, connect: Connect
) -> None:
    async with serving() as served:
        await work(served)
        for _ in range(3):
            leaving = await connect(served)
            await leaving.send(request("GET", "/debug/trace"))
            await leaving.close()
        while (reply := await served.get("/debug/trace")).status == 429:
            await asyncio.sleep(0.01)
        read_trace(reply.text)
