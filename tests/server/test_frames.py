"""Frames for many clients: whole and in order, whatever each of their sockets takes."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import trustme

from aioinfer.native import build as building
from aioinfer.native import sending
from aioinfer.native.build import BuildFailed, build_sockets
from aioinfer.native.sending import Sender, load_sender
from aioinfer.server.http.frames import FrameWriter, descriptor, load_writer
from tests.model.harness import require
from tests.native.compilers import WORKS, Compiler, calls, compiler

__all__ = ["compiler"]


@pytest.fixture(scope="module")
def sender() -> Sender:
    require("native")
    found = load_sender()
    assert found is not None, "there is a compiler, and it cannot build the sender"
    return found


class Connected:
    """A transport of the running loop, and the other end of its connection."""

    def __init__(self, transport: asyncio.Transport, other: socket.socket) -> None:
        self.transport = transport
        self.socket = descriptor(transport)
        self.other = other
        self.failures: list[Exception] = []

    @classmethod
    async def pair(cls, buffer: int | None = None) -> Connected:
        ours, other = socket.socketpair()
        ours.setblocking(False)
        if buffer is not None:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer)
        transport, _ = await asyncio.get_running_loop().create_connection(asyncio.Protocol, sock=ours)
        return cls(transport, other)

    @property
    def unsent(self) -> int:
        return self.transport.get_write_buffer_size()

    def fail(self, error: Exception) -> None:
        self.failures.append(error)

    async def read(self, count: int) -> bytes:
        self.other.setblocking(False)
        found = b""
        while len(found) < count:
            found += await asyncio.get_running_loop().sock_recv(self.other, count - len(found))
        return found

    def close(self) -> None:
        self.transport.close()
        self.other.close()


async def test_each_client_gets_its_own_frames_in_order(sender: Sender) -> None:
    clients = [await Connected.pair() for _ in range(50)]
    writer = FrameWriter(sender)
    for turn in range(3):
        for number, client in enumerate(clients):
            writer.add(b"%d-%d " % (turn, number) * (number + 1), client, client.unsent)
        writer.send()
    for number, client in enumerate(clients):
        expected = b"".join(b"%d-%d " % (turn, number) * (number + 1) for turn in range(3))
        assert await client.read(len(expected)) == expected
        assert not client.failures
        client.close()


async def test_what_a_full_socket_does_not_take_follows_in_order(sender: Sender) -> None:
    client, neighbour = await Connected.pair(buffer=4096), await Connected.pair()
    writer = FrameWriter(sender)
    frames = [bytes([65 + turn]) * 40_000 for turn in range(5)]
    for turn, frame in enumerate(frames):
        writer.add(frame, client, client.unsent)
        writer.add(b"%d" % turn, neighbour, neighbour.unsent)
        writer.send()
    assert client.unsent > 100_000, "the socket took what it has no room for"
    assert await neighbour.read(5) == b"01234"
    assert await client.read(200_000) == b"".join(frames)
    client.close()
    neighbour.close()


async def test_frames_of_one_socket_in_a_batch_stay_in_order_when_it_takes_a_part(sender: Sender) -> None:
    def sent(sockets: array[int], frames: Sequence[bytes]) -> Sequence[int]:
        taken.append([*sockets])
        assert len(frames) == len(sockets)
        return [
            socket.socket.send(files[each], frame[:3]) for each, frame in zip(sockets, frames, strict=True)
        ]

    class Short(Sender):
        """Room for 3 bytes of each frame, and then for more."""

        def __init__(self) -> None: ...

        send = staticmethod(sent)  # type: ignore[assignment]

    first, neighbour = await Connected.pair(), await Connected.pair()
    choices = [Connected(first.transport, first.other) for _ in range(3)]
    taken: list[list[int]] = []
    files = {each.socket: socket.socket(fileno=os.dup(each.socket)) for each in (first, neighbour)}
    writer = FrameWriter(Short())
    for turn in range(2):
        for number, choice in enumerate(choices):
            writer.add(b"<%d of %d>" % (number, turn), choice, first.unsent)
            writer.add(b"!", neighbour, neighbour.unsent)
        writer.send()
    expected = b"".join(b"<%d of %d>" % (number, turn) for turn in range(2) for number in range(3))
    async with asyncio.timeout(60):  # bytes that are lost never come
        assert await first.read(len(expected)) == expected
        assert await neighbour.read(6) == b"!" * 6
    assert taken == [[first.socket, neighbour.socket]] * 2
    for client in (first, neighbour):
        files[client.socket].close()
        client.close()


async def test_all_targets_of_a_socket_fail_with_it(sender: Sender) -> None:
    client = await Connected.pair()

    class Broken(Connected):
        def write(self, data: bytes) -> None:
            raise ValueError(f"{len(data)} bytes")

    targets = [Broken(client.transport, client.other) for _ in range(2)]
    for each in targets:
        each.transport = each  # type: ignore[assignment]
    client.other.close()
    writer = FrameWriter(sender)
    for each in targets:
        writer.add(b"frame", each, 0)
    writer.send()
    assert [[str(error) for error in each.failures] for each in targets] == [["10 bytes"]] * 2
    client.close()


async def test_a_client_that_has_left_disturbs_no_other(sender: Sender) -> None:
    gone, there = await Connected.pair(), await Connected.pair()
    gone.other.close()
    writer = FrameWriter(sender)
    for _ in range(2):
        for client in (gone, there):
            if not client.transport.is_closing():
                writer.add(b"frame", client, client.unsent)
        writer.send()
        await asyncio.sleep(0)
    assert await there.read(10) == b"frameframe"
    assert gone.transport.is_closing()
    assert not gone.failures, "transports report what is wrong with a socket in their own way"
    there.close()


async def test_what_a_transport_raises_fails_its_own_target(sender: Sender) -> None:
    client, neighbour = await Connected.pair(), await Connected.pair()

    class Broken(Connected):
        def write(self, data: bytes) -> None:
            raise ValueError(f"{len(data)} bytes")

    broken = Broken(client.transport, client.other)
    broken.transport = broken  # type: ignore[assignment]
    client.other.close()
    writer = FrameWriter(sender)
    writer.add(b"frame", broken, 0)
    writer.add(b"frame", neighbour, 0)
    writer.send()
    assert [str(error) for error in broken.failures] == ["5 bytes"]
    assert await neighbour.read(5) == b"frame"
    client.close()
    neighbour.close()


async def test_without_a_sender_frames_are_written_at_once() -> None:
    client = await Connected.pair()
    writer = FrameWriter()
    writer.add(b"one", client, client.unsent)
    assert await client.read(3) == b"one"
    writer.send()
    client.close()


async def test_a_transport_of_tls_has_no_descriptor() -> None:
    authority = trustme.CA()
    server_context, client_context = (
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH),
        ssl.create_default_context(),
    )
    authority.issue_cert("localhost").configure_cert(server_context)
    authority.configure_trust(client_context)
    accepted: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    class Server(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            accepted.set_result(transport)

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Server, "127.0.0.1", 0, ssl=server_context)
    port = server.sockets[0].getsockname()[1]
    transport, _ = await loop.create_connection(
        asyncio.Protocol, "127.0.0.1", port, ssl=client_context, server_hostname="localhost"
    )
    secured = await accepted
    assert descriptor(secured) == -1
    for each in (transport, secured):
        each.abort()
    server.close()
    await server.wait_closed()


# -- the library ---------------------------------------------------------------------------------------


@pytest.fixture
def unloaded() -> Iterator[None]:
    """A process that has not tried to load the sender."""
    sending._load.cache_clear()
    yield
    sending._load.cache_clear()


@pytest.mark.usefixtures("unloaded")
async def test_without_a_compiler_there_is_no_sender_and_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AIOINFER_CACHE", str(tmp_path))
    monkeypatch.setenv("AIOINFER_CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO, "aioinfer"):
        for _ in range(2):
            client = await Connected.pair()
            writer = await load_writer()
            writer.add(b"frame", client, 0)
            writer.send()
            assert await client.read(5) == b"frame"
            client.close()
    (line,) = [record.message for record in caplog.records]
    assert "no-such-compiler" in line


def test_the_sender_is_compiled_once_and_with_nothing_else(compiler: Compiler) -> None:
    script = compiler(WORKS)
    path = build_sockets()
    assert path.name.startswith("sockets-")
    assert build_sockets() == path
    assert calls(script) == 2


@pytest.mark.usefixtures("unloaded")
def test_a_file_that_is_no_library_is_no_sender(compiler: Compiler, caplog: pytest.LogCaptureFixture) -> None:
    compiler(WORKS)
    with caplog.at_level(logging.INFO, "aioinfer"):
        assert load_sender() is None
    assert caplog.records


def test_a_failing_compiler_is_a_build_that_fails(compiler: Compiler) -> None:
    compiler('\n[ "$1" = --version ] && echo 1 && exit\necho "error: no" >&2; exit 1')
    with pytest.raises(BuildFailed, match="error: no"):
        build_sockets()
    assert building.cache_directory().exists()
