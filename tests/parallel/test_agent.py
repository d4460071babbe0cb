"""An engine behind a socket: the handshake, the streams, a reader that is slow, and connections that end."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import struct
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer import SamplingParams, errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError, EngineError, EngineFailed
from aioinfer.loop.options import RequestOptions
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.agent import Agent
from aioinfer.parallel.columns import pack_rows, unpack_rows
from aioinfer.parallel.frames import HANDSHAKE_LIMIT, PROTOCOL, FrameReader, Kind, frame
from aioinfer.parallel.messages import Hello, Reason, Submit, Welcome
from aioinfer.parallel.remote import SocketReplica, connector
from aioinfer.parallel.replica import ReplicaState, Rows
from aioinfer.params import Grammar
from aioinfer.testing import TimedLauncher, ToyDevice, ToyTokenizer

VOCAB = 40
LONGEST = 400
TOKEN = "not a secret"


def toy(seconds: float = 0.0, **settings: Any) -> Engine:
    """A toy of which each step takes so long."""
    config = EngineConfig(model="toy", page_size=4, max_running_requests=8, seed=1, **settings)

    def launcher(_: EngineConfig) -> TimedLauncher:
        device = ToyDevice(
            num_pages=1000,
            page_size=4,
            num_slots=config.num_slots,
            vocab_size=VOCAB,
            max_model_len=LONGEST,
            snapshots=None,
        )
        return TimedLauncher(device, lambda _: seconds)

    return Engine(config, launcher=launcher, tokenizer=lambda _: ToyTokenizer(VOCAB))


class Served(SocketReplica):
    """A replica whose engine and agent are on this loop, behind a real socket."""

    def __init__(self, engine: Engine, name: str, path: Path, token: str = TOKEN) -> None:
        super().__init__(str(path), name, token=token)
        self.engine = engine
        self.path = path
        self.agent: Agent
        self._server: asyncio.Server | None = None

    async def launch(self, progress: Any = None) -> None:
        if self.engine.closed:
            await self.engine.start()
            self.agent = Agent(self.engine, token=TOKEN)
            self.path.unlink(missing_ok=True)
            loop = asyncio.get_running_loop()
            self._server = await loop.create_unix_server(self.agent.connect, self.path)
        await super().launch(progress)

    async def aclose(self) -> None:
        await super().aclose()
        if self._server is not None:
            self._server.close()
            await self.agent.aclose()
        await self.engine.aclose()


class ServedDispatcher(Dispatcher):
    def __init__(self, engines: list[Engine], directory: Path, **options: Any) -> None:
        self._directory = directory
        super().__init__(engines, **options)

    def _replica_of(self, engine: Engine, name: str) -> Any:
        return Served(engine, name, self._directory / name)

    @property
    def replicas(self) -> list[Served]:
        return self._replicas  # type: ignore[return-value]


@contextlib.asynccontextmanager
async def dispatching(directory: Path, *engines: Engine, **options: Any) -> AsyncIterator[ServedDispatcher]:
    dispatcher = ServedDispatcher(list(engines), directory, **options)
    await dispatcher.start()
    try:
        yield dispatcher
    finally:
        await dispatcher.aclose()
    for replica in dispatcher.replicas:
        assert not replica.load.requests
        assert not replica.agent._sessions


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


PARAMS = SamplingParams(
    ignore_eos=True, max_tokens=60, temperature=1.0, seed=3, logprobs=2, prompt_logprobs=1
)

# -- streams -------------------------------------------------------------------------------------------


async def test_a_stream_through_a_socket_is_that_of_the_engine(tmp_path: Path) -> None:
    async with toy() as alone:
        expected = await alone.generate([1, 2, 3, 4, 5], PARAMS)
    async with dispatching(tmp_path, toy()) as dispatcher:
        result = await dispatcher.generate([1, 2, 3, 4, 5], PARAMS, request_id="mine")
        unscored = dataclasses.replace(PARAMS, prompt_logprobs=None)
        chunks = [chunk async for chunk in dispatcher.generate([1, 2, 3, 4, 5], unscored)]
    assert result == expected
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [each for chunk in chunks for each in chunk.token_ids] == expected.token_ids
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.cached_tokens == 4  # of the first one's prompt
    assert result.request_id == "mine"
    assert result.metrics is not None
    times = [result.metrics.arrival, result.metrics.admitted, *result.metrics.token_times]
    assert times == sorted(times)  # type: ignore[type-var]


async def test_what_a_request_leaves_open_is_not_taken_from_the_replicas_model(tmp_path: Path) -> None:
    """The dispatcher has taken its own by then: a value that equals the default was given."""
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=1)
    async with toy() as alone:
        expected = await alone.generate([1, 2], params)
    async with dispatching(tmp_path, toy(waiting_timeout=1e-6, max_lag=1)) as dispatcher:
        engine = dispatcher.replicas[0].engine
        engine.default_params = SamplingParams(temperature=0.0)
        dispatcher.config = EngineConfig(model="toy")
        assert await dispatcher.generate([1, 2], params) == expected


async def test_a_lost_stream_goes_on_behind_another_socket(tmp_path: Path) -> None:
    async with toy() as alone:
        expected = await alone.generate([1, 2, 3], PARAMS)
    async with dispatching(tmp_path, toy(0.001), toy(0.001), policy="round_robin") as dispatcher:
        stream = dispatcher.generate([1, 2, 3], PARAMS)
        ids: list[int] = []
        async for chunk in stream:
            ids += chunk.token_ids
            if len(ids) > 10 and all(each.state is ReplicaState.READY for each in dispatcher.replicas):
                (replica,) = [each for each in dispatcher.replicas if each.load.requests]
                await replica.agent.aclose()
        result = stream.result()
        stats = dispatcher.stats()
        assert (stats.resumed, stats.diverged, stats.ready_replicas) == (1, 0, 1)
        assert "its connection was closed" in str(next(each.cause for each in stats.replicas if each.cause))
        name = next(each.name for each in stats.replicas if each.state == "lost")
        await dispatcher.restart(name)
        assert dispatcher.stats().ready_replicas == 2
        assert await dispatcher.generate([1, 2, 3], PARAMS) == expected
    assert ids == result.token_ids == expected.token_ids
    assert (result.text, result.logprobs, result.prompt_logprobs) == (
        *(expected.text, expected.logprobs, expected.prompt_logprobs),
    )


async def test_an_engine_that_is_lost_says_so(tmp_path: Path) -> None:
    async with dispatching(tmp_path, toy(0.001)) as dispatcher:
        stream = dispatcher.generate([1, 2, 3], PARAMS)
        await anext(stream)
        runtime: Any = dispatcher.replicas[0].engine._runtime
        runtime.lost(RuntimeError("it fell off the bus"))
        with pytest.raises(EngineFailed, match="it fell off the bus"):
            await stream


async def test_a_request_that_the_replica_refuses_fails_alone(tmp_path: Path) -> None:
    async with dispatching(tmp_path, toy(0.001)) as dispatcher:
        other = dispatcher.generate([1, 2, 3], PARAMS)
        with pytest.raises(errors.InvalidRequest) as caught:
            # The dispatcher sees that it is one, and only a grammar compiler that it is wrong.
            await dispatcher.generate([1], SamplingParams(grammar=Grammar("regex", "("), seed=1))
        assert caught.value.field
        assert len((await other).token_ids) == 60


async def test_the_first_step_of_a_request_is_told_before_it_brings_anything(tmp_path: Path) -> None:
    """So that a request that ends a replica with its first step is known as one that it had begun."""
    async with dispatching(tmp_path, toy(0.3)) as dispatcher:
        stream = dispatcher.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=1))
        await until(lambda: stream.admitted)
        assert not stream.usage.completion_tokens
        (attempt,) = dispatcher.replicas[0].load.attempts.values()
        assert dispatcher.replicas[0].begun(attempt)
        await stream


async def test_deadlines_are_those_of_the_request(tmp_path: Path) -> None:
    async with dispatching(tmp_path, toy(0.02)) as dispatcher:
        with pytest.raises(errors.TimedOut) as caught:
            await dispatcher.generate([1, 2, 3], PARAMS, running_timeout=0.05)
        assert (caught.value.phase, caught.value.seconds) == ("running", 0.05)


async def test_a_stream_that_is_closed_ends_in_the_replica(tmp_path: Path) -> None:
    async with dispatching(tmp_path, toy(0.001)) as dispatcher:
        engine = dispatcher.replicas[0].engine
        stream = dispatcher.generate([1, 2, 3], SamplingParams(seed=1, ignore_eos=True, max_tokens=300))
        await anext(stream)
        assert engine.stats().running == 1
        stream.close()
        await until(lambda: not engine.stats().running)
        assert not dispatcher.replicas[0].agent.session.open  # type: ignore[union-attr]


# -- readers -------------------------------------------------------------------------------------------


async def test_a_reader_that_lags_parks_its_request_in_the_replica(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
    async with toy() as alone:
        expected = await alone.generate([1, 2, 3], params)
    async with dispatching(tmp_path, toy()) as dispatcher:
        engine = dispatcher.replicas[0].engine
        stream = dispatcher.generate([1, 2, 3], params, max_lag=10)
        ids: list[int] = []
        while len(ids) < 200:
            parkings = engine.stats().parkings
            await until(lambda before=parkings: stream.done or engine.stats().parkings > before)
            await until(lambda: stream.done or not engine.stats().steps_in_flight)
            # Half of the lag may have been read without a word, and some steps were in flight.
            assert len(ids) + 10 - 5 <= stream.usage.completion_tokens <= len(ids) + 10 + 4 or stream.done
            ids += (await anext(stream)).token_ids
        assert ids == expected.token_ids
        assert engine.stats().parkings > 5


async def test_a_reader_that_waits_does_not_lag(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
    async with dispatching(tmp_path, toy(0.001)) as dispatcher:
        assert len((await dispatcher.generate([1, 2, 3], params, max_lag=20)).token_ids) == 200
        assert dispatcher.replicas[0].engine.stats().parkings < 10


async def test_a_reader_of_some_of_it_is_never_forgotten(tmp_path: Path) -> None:
    """Also one that reads less at a time than what the replica is told at once."""
    params = SamplingParams(max_tokens=120, seed=1, ignore_eos=True)
    async with dispatching(tmp_path, toy(0.0005)) as dispatcher:
        for lag in (1, 2, 3, 7):
            stream = dispatcher.generate([1, 2, lag], params, max_lag=lag)
            async with asyncio.timeout(30):
                count = 0
                async for chunk in stream:
                    count += len(chunk.token_ids)
                    await asyncio.sleep(0.002)
            assert count == 120


# -- the handshake -------------------------------------------------------------------------------------


class Peer:
    """A dispatcher that says anything."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._frames = FrameReader()
        self._found: list[tuple[Kind, bytes]] = []
        self.writer = writer

    @classmethod
    async def connect(cls, path: Path) -> Peer:
        return cls(*await asyncio.open_unix_connection(path))

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        self.writer.write(frame(kind, payload))

    async def next(self) -> tuple[Kind, bytes] | None:
        """None at the end."""
        async with asyncio.timeout(10):
            while not self._found:
                data = await self._reader.read(1 << 16)
                if not data:
                    return None
                self._found += self._frames.feed(data)
        return self._found.pop(0)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    replica = Served(toy(0.001), "it", tmp_path / "it")
    await replica.launch()
    await replica._disconnect()
    yield replica
    await replica.aclose()


async def test_a_replica_says_what_it_is(served: Served) -> None:
    peer = await Peer.connect(served.path)
    peer.send(Kind.HELLO, Hello(TOKEN).pack())
    answer = await peer.next()
    assert answer is not None
    assert answer[0] is Kind.WELCOME
    welcome = Welcome.unpack(answer[1])
    assert welcome.info == served.engine.info
    assert (welcome.slots, welcome.step_tokens) == (8, served.engine.config.max_step_tokens)
    later = await peer.next()
    assert later is not None
    assert later[0] is Kind.STATS
    await peer.close()


@pytest.mark.parametrize(
    ("hello", "reason", "message"),
    [
        (Hello("wrong"), "token", "the token is not that of this replica"),
        (Hello(), "token", "the token is not that of this replica"),
        (Hello(TOKEN, protocol=PROTOCOL + 1), "protocol", "it speaks protocol 2, and this replica 1"),
        (Hello(TOKEN, "other"), "fingerprint", "it wants the model other, and this replica has"),
    ],
)
async def test_others_are_refused_logged_once_and_counted(
    served: Served, hello: Hello, reason: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "aioinfer"):
        for _ in range(3):
            peer = await Peer.connect(served.path)
            peer.send(Kind.HELLO, hello.pack())
            answer = await peer.next()
            assert answer is not None
            assert answer[0] is Kind.REFUSED
            assert message in Reason.unpack(answer[1])
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
        struct.pack("<IB", HANDSHAKE_LIMIT + 1, Kind.HELLO),
        frame(Kind.SUBMIT, b"x"),
        frame(Kind.HELLO, b"{}"),
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
        struct.pack("<IB", (1 << 32) - 1, Kind.SUBMIT),
        frame(Kind.SUBMIT, b"nothing"),
        frame(Kind.ROWS, b""),
        frame(Kind.ABORT, b"1"),
    ],
)
async def test_what_a_dispatcher_may_not_send_ends_its_connection_and_its_requests(
    served: Served, data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    peer = await Peer.connect(served.path)
    peer.send(Kind.HELLO, Hello(TOKEN).pack())
    order = Submit(
        1, (1, 2), SamplingParams(seed=1, ignore_eos=True, max_tokens=300), RequestOptions(), None, 0
    )
    peer.send(Kind.SUBMIT, order.pack())
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
    monkeypatch.setattr("aioinfer.parallel.remote._PATIENCE", 0.02)
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


# -- a replica that says anything ----------------------------------------------------------------------


@contextlib.asynccontextmanager
async def saying(path: Path, welcome: bytes, *frames: bytes) -> AsyncIterator[None]:
    """A replica that sends these, and stays."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.read(100)
            writer.write(welcome)
            for each in frames:
                writer.write(each)
            await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_unix_server(answer, path)
    try:
        yield
    finally:
        server.close()


class Told:
    """What a replica reports."""

    def __init__(self) -> None:
        self.causes: list[BaseException] = []
        self.left = 0

    def moved(self, rows: Any) -> None:
        raise AssertionError(rows)

    def leaving(self, replica: Any) -> None:
        self.left += 1

    def lost(self, replica: Any, cause: BaseException) -> None:
        self.causes.append(cause)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (struct.pack("<IB", (1 << 32) - 1, Kind.ROWS), "a frame of 4294967295 bytes"),
        (struct.pack("<IB", 1, 77), "no frames of kind 77"),
        (frame(Kind.ROWS, b"rows"), "rows that make no sense"),
        (frame(Kind.STATS, b"{}"), "other fields than those of EngineStats"),
        (frame(Kind.SUBMIT), "SUBMIT is nothing that a replica sends"),
        (frame(Kind.LOST, Reason.pack("it burns")), "it burns"),
    ],
)
async def test_what_a_replica_may_not_send_ends_that_replica(
    tmp_path: Path, data: bytes, message: str
) -> None:
    async with toy() as engine:
        welcome = frame(Kind.WELCOME, Welcome(engine.info, 8, 512, engine.stats()).pack())
    replica, told = SocketReplica(str(tmp_path / "x"), "x"), Told()
    async with saying(tmp_path / "x", welcome):
        await replica.launch()
        await replica.start(told)
        link = replica._link
        assert link is not None
        link.connection.data_received(data)
        await until(lambda: told.causes)
        assert message in str(told.causes[0])
        await replica.aclose()
    assert len(told.causes) == 1


async def test_a_token_outside_of_the_vocabulary_ends_that_replica(tmp_path: Path) -> None:
    async with toy() as engine:
        welcome = frame(Kind.WELCOME, Welcome(engine.info, 8, 512, engine.stats()).pack())
    rows = frame(Kind.ROWS, pack_rows([(1, Rows(0, 0, [VOCAB]))], 0.0))
    replica, told = SocketReplica(str(tmp_path / "x"), "x"), Told()
    async with saying(tmp_path / "x", welcome):
        await replica.launch()
        await replica.start(told)
        assert replica._link is not None
        replica._link.connection.data_received(rows)
        await until(lambda: told.causes)
        assert f"a token {VOCAB} that is not in the vocabulary" in str(told.causes[0])
        await replica.aclose()


async def test_another_model_than_the_wanted_one_is_refused(tmp_path: Path) -> None:
    async with toy() as engine:
        welcome = frame(Kind.WELCOME, Welcome(engine.info, 8, 512, engine.stats()).pack())
    replica = SocketReplica(str(tmp_path / "x"), "x", fingerprint="another")
    async with saying(tmp_path / "x", welcome):
        with pytest.raises(ConfigError, match="and not another"):
            await replica.launch()
    assert replica.refused.total() == 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats of 20 ms."""
    for module in ("agent", "remote"):
        monkeypatch.setattr(f"aioinfer.parallel.{module}.BEAT", 0.02)


async def test_a_replica_without_work_is_alive(quick: None, served: Served) -> None:
    told = Told()
    await served.launch()
    await served.start(told)
    before = served.stats()
    await until(lambda: served.stats() is not before)
    link = served._link
    assert link is not None
    misses: list[int] = []
    for _ in range(10):
        await asyncio.sleep(0.02)
        misses.append(link._misses)
    assert not told.causes
    assert 0 in misses


async def test_silence_is_noticed(quick: None, tmp_path: Path) -> None:
    async with toy() as engine:
        welcome = frame(Kind.WELCOME, Welcome(engine.info, 8, 512, engine.stats()).pack())
    replica, told = SocketReplica(str(tmp_path / "x"), "x"), Told()
    async with saying(tmp_path / "x", welcome):
        await replica.launch()
        await replica.start(told)
        await until(lambda: told.causes)
        assert "no frame for 0.06 s" in str(told.causes[0])
        await replica.aclose()


async def test_a_dispatcher_that_is_silent_is_sent_away(
    quick: None, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its host is gone, and never closed the socket."""
    monkeypatch.setattr("aioinfer.parallel.agent._SILENCE", 0.1)
    peer = await Peer.connect(served.path)
    peer.send(Kind.HELLO, Hello(TOKEN).pack())
    while await peer.next() is not None:
        pass
    assert "no frame for 0.1 s" in caplog.text
    await peer.close()
    await served.launch()


# -- back-pressure -------------------------------------------------------------------------------------


async def test_while_nobody_reads_what_is_new_stays_in_the_outputs(served: Served) -> None:
    """Then it is one row."""
    peer = await Peer.connect(served.path)
    peer.send(Kind.HELLO, Hello(TOKEN).pack())
    await peer.next()
    session: Any = served.agent.session
    session.connection.pause_writing()
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=100, logprobs=1)
    for number in (1, 2):
        peer.send(Kind.SUBMIT, Submit(number, (1, 2), params, RequestOptions(), None, 0).pack())
    await until(lambda: served.engine.stats().finished == 2)
    assert len(session._moved) == 2
    assert not session.connection._out
    session.connection.resume_writing()
    found = await peer.next()
    while found is not None and found[0] is Kind.STATS:
        found = await peer.next()
    assert found is not None
    rows = unpack_rows(found[1], 0.0)
    assert sorted(number for number, _ in rows) == [1, 2]
    for _, row in rows:
        assert (row.first, row.at, len(row.ids), len(row.logprobs)) == (0, 0, 100, 100)
        assert row.ending is not None
        assert row.ending.finish_reason == "length"
    assert not session.open
    await peer.close()


async def test_rows_of_one_step_are_one_frame(served: Served) -> None:
    peer = await Peer.connect(served.path)
    peer.send(Kind.HELLO, Hello(TOKEN).pack())
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=20)
    for number in range(6):
        peer.send(Kind.SUBMIT, Submit(number, (1, 2), params, RequestOptions(), None, 0).pack())
    frames, ended = 0, 0
    while ended < 6:
        found = await peer.next()
        assert found is not None
        if found[0] is Kind.ROWS:
            rows = unpack_rows(found[1], 0.0)
            frames += 1
            ended += sum(row.ending is not None for _, row in rows)
    assert frames <= served.engine.stats().steps + 6
    await peer.close()


async def test_rows_that_are_too_large_for_one_frame_are_several(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = await Peer.connect(served.path)
    peer.send(Kind.HELLO, Hello(TOKEN).pack())
    await peer.next()
    session: Any = served.agent.session
    session.connection.pause_writing()
    params = SamplingParams(seed=1, ignore_eos=True, max_tokens=20)
    long = SamplingParams(seed=1, ignore_eos=True, max_tokens=300)
    for number, each in ((1, params), (2, params), (3, long)):
        peer.send(Kind.SUBMIT, Submit(number, (1, 2), each, RequestOptions(), None, 0).pack())
    await until(lambda: served.engine.stats().finished == 3)
    monkeypatch.setattr("aioinfer.parallel.frames.LIMIT", 600)
    session.connection.resume_writing()
    await until(lambda: not session.open)
    endings: dict[int, Any] = {}
    while len(endings) < 3:
        found = await peer.next()
        assert found is not None
        if found[0] is Kind.ROWS:
            endings |= {number: row.ending for number, row in unpack_rows(found[1], 0.0) if row.ending}
    assert endings[1].finish_reason == endings[2].finish_reason == "length"
    assert "cannot be sent" in str(endings[3].error)
    await peer.close()


# -- the rest ------------------------------------------------------------------------------------------


async def test_a_dispatcher_can_be_closed_twice_and_started_again(tmp_path: Path) -> None:
    dispatcher = ServedDispatcher([toy()], tmp_path)
    for _ in range(2):
        await dispatcher.start()
        assert len((await dispatcher.generate([1, 2, 3], PARAMS)).token_ids) == 60
        await dispatcher.aclose()
        await dispatcher.aclose()
        assert dispatcher.closed


async def test_pausing_and_flushing_reach_the_engine(tmp_path: Path) -> None:
    async with dispatching(tmp_path, toy(0.001)) as dispatcher:
        engine = dispatcher.replicas[0].engine
        stream = dispatcher.generate([1, 2, 3, 4, 5, 6], PARAMS)
        await anext(stream)
        await dispatcher.pause()
        assert engine.stats().paused
        assert not engine.stats().steps_in_flight
        dispatcher.resume()
        await stream
        await until(lambda: dispatcher.stats().pages_evictable)
        known = dispatcher.stats().pages_evictable
        assert known == engine.stats().pages_evictable
        assert dispatcher.flush_cache() == known
        await until(lambda: not engine.stats().pages_evictable)


async def test_a_replica_that_is_left_by_its_dispatcher_goes_on_computing(served: Served) -> None:
    """Also where the dispatcher had paused it."""
    await served.launch()
    await served.start(Told())
    await served.pause()
    assert served.engine.stats().paused
    await served._disconnect()
    await until(lambda: not served.engine.stats().paused)


async def test_a_replica_that_leaves_gives_its_streams_away(tmp_path: Path) -> None:
    async with toy() as alone:
        expected = await alone.generate([1, 2, 3], PARAMS)
    async with dispatching(tmp_path, toy(0.001), toy(0.001)) as dispatcher:
        stream = dispatcher.generate([1, 2, 3], PARAMS)
        await anext(stream)
        (replica,) = [each for each in dispatcher.replicas if each.load.requests]
        await replica.agent.drain()
        assert replica.state is ReplicaState.DRAINING
        assert (await stream).token_ids == expected.token_ids
        assert dispatcher.stats().resumed == 1
        with pytest.raises(ConfigError, match="the engine of this replica is running"):
            await replica.launch()
