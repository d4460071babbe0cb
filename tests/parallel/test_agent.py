"""An engine behind a socket: who may have it, and a dispatcher that reads slowly."""

from __future__ import annotations

import logging
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from aioinfer import SamplingParams
from aioinfer.errors import ConfigError, EngineError
from aioinfer.parallel.connection import connector
from aioinfer.parallel.frames import HANDSHAKE_LIMIT, frame
from aioinfer.parallel.messages import (
    PROTOCOL,
    Abort,
    Hello,
    Refused,
    Stats,
    StepRows,
    Submit,
    Welcome,
    encoded,
)
from aioinfer.parallel.remote import SocketReplica
from aioinfer.parallel.replica import ReplicaState
from aioinfer.request import Request
from tests.parallel.served import TOKEN, Peer, Served
from tests.parallel.waiting import until
from tests.tiers import SECONDS, rest

# -- the handshake -------------------------------------------------------------------------------------


@rest(SECONDS)
async def test_a_replica_says_what_it_is(served: Served) -> None:
    peer = await Peer.connect(served.path)
    peer.send(Hello(TOKEN))
    answer = await peer.next()
    assert isinstance(answer, Welcome)
    welcome = answer
    assert welcome.info == served.engine.info
    assert (welcome.slots, welcome.step_tokens) == (8, served.engine.config.step_tokens)
    later = await peer.next()
    assert isinstance(later, Stats)
    await peer.close()


@pytest.mark.parametrize(
    ("hello", "reason", "message"),
    [
        (Hello("wrong"), "token", "the token is not that of this replica"),
        (Hello(), "token", "the token is not that of this replica"),
        (
            Hello(TOKEN, protocol="4"),
            "protocol",
            f"it speaks protocol 4, and this replica {PROTOCOL}",
        ),
    ],
)
async def test_others_are_refused_logged_once_and_counted(
    served: Served, hello: Hello, reason: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "aioinfer"):
        for _ in range(3):
            peer = await Peer.connect(served.path)
            peer.send(hello)
            answer = await peer.next()
            assert isinstance(answer, Refused)
            assert message in answer.reason
            assert await peer.next() is None
            await peer.close()
    assert served.agent.refused == {reason: 3}
    assert sum(message in record.getMessage() for record in caplog.records) == 1
    await served.launch()
    await served.start(None)  # type: ignore[arg-type]


async def test_one_dispatcher_at_a_time_has_a_replica(served: Served) -> None:
    await served.launch()
    second = SocketReplica(str(served.path), "second", token=TOKEN)
    with pytest.raises(ConfigError, match="another dispatcher has this replica"):
        await second.launch()
    await served._disconnect()
    await until(lambda: served.agent.session is None)
    await second.launch()
    await second.aclose()


async def test_a_dispatcher_counts_what_it_refuses(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    wrong = SocketReplica(str(served.path), "wrong", token="x")
    with caplog.at_level(logging.WARNING, "aioinfer"):
        for _ in range(2):
            with pytest.raises(ConfigError, match="it refuses: the token is not"):
                await wrong.launch()
    assert wrong.refused.total() == 2
    told = [record for record in caplog.records if "the replica wrong is not used" in record.getMessage()]
    assert len(told) == 1


async def test_bytes_that_are_no_frame_end_one_connection(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    for data in (
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<I", HANDSHAKE_LIMIT + 1),
        frame(encoded(Abort(1))),
        frame(b"{}"),
    ):
        peer = await Peer.connect(served.path)
        peer.writer.write(data)
        assert await peer.next() is None
        await peer.close()
    await served.launch()
    assert served.state is ReplicaState.STARTING


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", (1 << 32) - 1),
        frame(b"nothing"),
        frame(encoded(StepRows([]))),
        frame(encoded(Hello(TOKEN))),
    ],
)
async def test_what_a_dispatcher_may_not_send_ends_its_connection_and_its_requests(
    served: Served, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await Peer.connect(served.path)
    peer.send(Hello(TOKEN))
    order = Submit.of(
        1, (1, 2), Request(params=SamplingParams(seed=1, ignore_eos=True, max_tokens=300)), None, 0
    )
    peer.send(order)
    await until(lambda: served.engine.stats().running)
    peer.writer.write(data)
    while await peer.next() is not None:
        pass
    await peer.close()
    await until(lambda: not served.engine.stats().running)
    assert "the connection of a dispatcher has ended" in caplog.text
    await served.launch()


async def test_no_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = SocketReplica(str(tmp_path / "none"), "nobody")
    with pytest.raises(EngineError, match="the replica nobody does not answer"):
        await nobody.launch()
    monkeypatch.setattr("aioinfer.parallel.remote.PATIENCE", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = SocketReplica(f"127.0.0.1:{silent.getsockname()[1]}", "mute")
        with pytest.raises(EngineError, match="the replica mute does not answer"):
            await mute.launch()
    with pytest.raises(EngineError, match="mute has not started"):
        _ = mute.info


async def test_who_shows_no_token_is_sent_away(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aioinfer.parallel.agent._PATIENCE", 0.01)
    peer = await Peer.connect(served.path)
    assert await peer.next() is None
    await peer.close()
    assert served.agent.refused == {"silent": 1}


@pytest.mark.parametrize("address", ["", "host", "host:", ":80", "host:99999", "host:x", "host:-1"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="address must be HOST:PORT or a path"):
        connector(address)


# -- back-pressure -------------------------------------------------------------------------------------


async def test_while_nobody_reads_what_is_new_stays_in_the_outputs(served: Served) -> None:
    """Then it is one row."""
    peer = await Peer.connect(served.path)
    peer.send(Hello(TOKEN))
    await peer.next()
    session: Any = served.agent.session
    session.connection.pause_writing()
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=100, logprobs=1)
    for number in (1, 2):
        peer.send(Submit.of(number, (1, 2), Request(params=params), None, 0))
    await until(lambda: served.engine.stats().finished == 2)
    assert len(session._moved) == 2
    assert not session.connection._out
    session.connection.resume_writing()
    found = await peer.next()
    while isinstance(found, Stats):
        found = await peer.next()
    assert isinstance(found, StepRows)
    rows = found.rows
    assert sorted(number for number, _ in rows) == [1, 2]
    for _, row in rows:
        assert (row.first, row.at, len(row.ids), len(row.logprobs)) == (0, 0, 100, 100)
        assert row.ending is not None
        assert row.ending.finish_reason == "length"
    assert not session.open
    await peer.close()


async def test_rows_of_one_step_are_one_frame(served: Served) -> None:
    peer = await Peer.connect(served.path)
    peer.send(Hello(TOKEN))
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=20)
    for number in range(6):
        peer.send(Submit.of(number, (1, 2), Request(params=params), None, 0))
    frames, ended = 0, 0
    while ended < 6:
        found = await peer.next()
        assert found is not None
        if isinstance(found, StepRows):
            rows = found.rows
            frames += 1
            ended += sum(row.ending is not None for _, row in rows)
    assert frames <= served.engine.stats().steps + 6
    await peer.close()


@rest(SECONDS)
async def test_rows_that_are_too_large_for_one_frame_are_several(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await Peer.connect(served.path)
    peer.send(Hello(TOKEN))
    await peer.next()
    session: Any = served.agent.session
    session.connection.pause_writing()
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=20)
    long = SamplingParams(seed=1, ignore_eos=True, max_tokens=300)
    for number, each in ((1, params), (2, params), (3, long)):
        peer.send(Submit.of(number, (1, 2), Request(params=each), None, 0))
    await until(lambda: served.engine.stats().finished == 3)
    monkeypatch.setattr("aioinfer.parallel.frames.LIMIT", 600)
    session.connection.resume_writing()
    await until(lambda: not session.open)
    endings: dict[int, Any] = {}
    while len(endings) < 3:
        found = await peer.next()
        assert found is not None
        if isinstance(found, StepRows):
            endings |= {number: row.ending for number, row in found.rows if row.ending}
    assert endings[1].finish_reason == endings[2].finish_reason == "length"
    assert "cannot be sent" in str(endings[3].error)
    await peer.close()
