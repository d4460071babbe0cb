"""A replica behind a socket that says anything, or nothing."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from aioinfer.errors import EngineError
from aioinfer.parallel.connection import Connection
from aioinfer.parallel.frames import frame
from aioinfer.parallel.messages import Abort, Adapted, Hello, Lost, StepRows, Welcome, encoded
from aioinfer.parallel.remote import SocketReplica
from aioinfer.parallel.rows import Rows
from tests.parallel.served import TOKEN, VOCAB, Peer, Served, Told, toy
from tests.parallel.waiting import until
from tests.tiers import SECONDS, rest

# -- a replica that says anything ----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def started(path: Path) -> AsyncIterator[tuple[SocketReplica, Told, Connection]]:
    """A started replica that has said what it is and no more; what it has reported, and its connection."""
    async with toy() as engine:
        welcome = frame(encoded(Welcome(engine.info, 8, 512, engine.stats())))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(100)
            writer.write(welcome)
            await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, path / "x")
    replica, told = SocketReplica(str(path / "x"), "x"), Told()
    await replica.launch()
    await replica.start(told)
    assert replica._link is not None
    try:
        yield replica, told, replica._link.connection
    finally:
        await replica.aclose()
        server.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<I", (1 << 32) - 1), "a frame of 4294967295 bytes"),
        (frame(b"rows"), "a message that makes no sense"),
        (frame(b"\x92\x13\x80"), "missing required field"),
        (frame(encoded(Abort(1))), "a message that makes no sense: Invalid value 3"),
        (frame(encoded(Lost("it burns"))), "it burns"),
        (
            frame(encoded(StepRows([(1, Rows(0, 0, [VOCAB]))]))),
            f"a token {VOCAB} that is not in the vocabulary",
        ),
    ],
)
async def test_what_a_replica_may_not_send_ends_that_replica(
    tmp_path: Path, data: bytes, message: str
) -> None:
    async with started(tmp_path) as (_, told, connection):
        connection.data_received(data)
        await until(lambda: told.causes)
        assert message in str(told.causes[0])
    assert len(told.causes) == 1


async def test_a_load_whose_answer_does_not_name_the_adapter_fails(tmp_path: Path) -> None:
    async with started(tmp_path) as (replica, _, connection):
        load = asyncio.ensure_future(replica.load_adapter("a", "/a"))
        await asyncio.sleep(0)
        connection.data_received(frame(encoded(Adapted(1, (), None))))
        with pytest.raises(EngineError, match="does not name it"):
            await load


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of 20 ms, of which five make a loss."""
    monkeypatch.setattr("aioinfer.parallel.connection.BEAT", 0.02)
    monkeypatch.setattr("aioinfer.parallel.connection.LOST", 5)


@rest(SECONDS)
async def test_a_replica_without_work_is_alive(quick: None, served: Served) -> None:
    told = Told()
    await served.launch()
    await served.start(told)
    for _ in range(10):
        before = served.stats()
        await until(lambda before=before: served.stats() is not before)
    assert not told.causes


async def test_silence_is_noticed(quick: None, tmp_path: Path) -> None:
    async with started(tmp_path) as (_, told, _):
        await until(lambda: told.causes)
        assert "no frame for 0.1 s" in str(told.causes[0])


@rest(SECONDS)
async def test_a_dispatcher_that_is_silent_is_sent_away(
    quick: None, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Its host is gone, and never closed the socket."""
    peer = await Peer.connect(served.path)
    peer.send(Hello(TOKEN))
    while await peer.next() is not None:
        pass
    assert "no frame for 0.1 s" in caplog.text
    await peer.close()
    await served.launch()
