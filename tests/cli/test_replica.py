"""``aioinfer replica``: where it listens, and what ends it."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from aioinfer.cli.main import main
from aioinfer.config import ReplicaConfig
from aioinfer.errors import ConfigError
from aioinfer.parallel.remote import SocketReplica
from tests.joining import arguments, still_running
from tests.tiers import PROGRAM, grid, nightly, rest

TOKEN = "a token of 16 characters and more"
COMMAND = [sys.executable, "-m", "aioinfer", "replica", "--threads", "1"]
SERVE = [*COMMAND[:3], "serve", "--threads", "1", "--replicas", "2", "--port", "0"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "socket or address must be given"),
        ({"socket": "a", "address": "80", "replica_token": TOKEN}, "and not both"),
        ({"socket": ""}, "socket must be a path"),
        ({"address": "7000"}, "replica_token must be given with address"),
        ({"address": "0.0.0.0:7000", "replica_token": "short"}, "at least 16 characters"),
        ({"address": "host", "replica_token": TOKEN}, "address must be PORT or HOST:PORT"),
        ({"address": "host:65536", "replica_token": TOKEN}, "address must be PORT or HOST:PORT"),
    ],
)
def test_a_place_to_listen_is_one_and_guarded(values: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ReplicaConfig(**values)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("7000", ("127.0.0.1", 7000)),
        (":0", ("127.0.0.1", 0)),
        ("[::1]:7000", ("::1", 7000)),
        ("gpu-1:7", ("gpu-1", 7)),
    ],
)
def test_an_address_is_on_loopback_unless_it_says_otherwise(address: str, expected: tuple[str, int]) -> None:
    assert ReplicaConfig(address=address, replica_token=TOKEN).host_and_port == expected


def test_a_socket_in_use_is_found_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "s"
    path.write_text("a file")
    assert main(["replica", "/no/such/model", "--socket", str(path)]) == 2
    assert "is no socket" in capsys.readouterr().err


class Child:
    """A replica in a process of its own."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*COMMAND, *arguments], stdin=pipe, stdout=pipe, text=True, env=os.environ | environ
        )

    def address(self) -> str:
        """Once it listens."""
        assert self.process.stdout is not None
        return next(line.split()[-1] for line in self.process.stdout if line.startswith("Replica on"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Child]:
    found = Child("--socket", str(tmp_path / "s"), "--with-parent")
    yield found
    found.close()


class Told:
    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.left: list[Any] = []
        self.causes: list[BaseException] = []

    def moved(self, rows: Any) -> None:
        self.rows += rows

    def adapted(self) -> None:
        pass

    def leaving(self, replica: Any) -> None:
        self.left.append(replica)

    def lost(self, replica: Any, cause: BaseException) -> None:
        self.causes.append(cause)


@nightly(PROGRAM)
async def test_a_replica_ends_with_the_process_that_started_it(child: Child, tmp_path: Path) -> None:
    path = child.address()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    replica, told = SocketReplica(path, "child"), Told()
    await replica.launch()
    await replica.start(told)
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert await asyncio.to_thread(child.process.wait, 120) == 0
    while not told.causes:
        await asyncio.sleep(0.01)
    # Closed, or reset if it has ended before it read the last frame.
    assert "onnection" in str(told.causes[0])
    await replica.aclose()
    assert os.listdir(tmp_path) == []


@rest(PROGRAM)
async def test_a_replica_on_tcp_wants_its_token_and_leaves_when_it_is_told_to_end() -> None:
    """A signal lets the dispatcher send its streams elsewhere."""
    found = Child("--address", "0", AIOINFER_REPLICA_TOKEN=TOKEN)
    try:
        address = found.address()
        assert address.startswith("127.0.0.1:")
        with pytest.raises(ConfigError, match="the token is not that of this replica"):
            await SocketReplica(address, "stranger", token="x" * 20).launch()
        replica, told = SocketReplica(address, "child", token=TOKEN), Told()
        await replica.launch()
        assert replica.info.model == "tiny-chat"
        await replica.start(told)
        found.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(found.process.wait, 120) == 0
        while not told.causes:
            await asyncio.sleep(0.01)
        assert told.left == [replica]
        await replica.aclose()
    finally:
        found.close()


def replicas(parent: int) -> list[psutil.Process]:
    """Those that a server has started, and no compiler or other program."""
    children = psutil.Process(parent).children()
    return [each for each in children if "replica" in arguments(each)]


def ask(port: int) -> str:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
    try:
        body = {"model": "tiny-chat", "prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        answer = json.loads(response.read())
        assert response.status == 200, answer
        return str(answer["choices"][0]["text"])
    finally:
        connection.close()


@rest(PROGRAM)
@pytest.mark.parametrize("number", grid([signal.SIGTERM], [signal.SIGINT], PROGRAM))
def test_serve_starts_replicas_and_ends_them(number: signal.Signals, tmp_path: Path) -> None:
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(SERVE, stdout=subprocess.PIPE, text=True, env=environ) as process:
        try:
            assert process.stdout is not None
            lines = iter(process.stdout)
            assert "2 engines: " in next(lines)
            port = next(int(line.split()[2].rsplit(":", 1)[1]) for line in lines if "Serving" in line)
            children = replicas(process.pid)
            assert len(children) == 2
            expected = ask(port)
            children[0].kill()
            assert [ask(port) for _ in range(4)] == [expected] * 4
            children = replicas(process.pid)
            process.send_signal(number)
            assert process.wait(120) == 0
            assert not still_running(children)
        finally:
            process.kill()
    assert os.listdir(tmp_path) == []


@nightly(PROGRAM)
def test_a_signal_while_replicas_load_ends_them(tmp_path: Path) -> None:
    environ = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen(SERVE, stderr=subprocess.PIPE, text=True, env=environ) as process:
        try:
            while len(children := replicas(process.pid)) < 2:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            assert process.wait(120) == 130
            assert not still_running(children)
        finally:
            process.kill()
    assert os.listdir(tmp_path) == []
