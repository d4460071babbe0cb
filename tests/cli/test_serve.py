"""Starts of ``aioinfer serve`` that fail: one clear line, an exit code, and no model loaded first."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from aioinfer.cli.main import main
from aioinfer.cli.serving import _as_server
from aioinfer.config import EngineConfig, ServerConfig
from aioinfer.errors import ConfigError
from aioinfer.loop.tuning import frozen
from aioinfer.server import serve
from aioinfer.server.http.listening import bind
from tests.server.test_mounting import make_engine
from tests.tiers import PROGRAM, SECONDS, rest

COMMAND = [sys.executable, "-m", "aioinfer", "serve", "--threads", "1"]
STATS = logging.getLogger("aioinfer.stats")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port in use."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def files(limit: int) -> Callable[[], None]:
    return partial(resource.setrlimit, resource.RLIMIT_NOFILE, (limit, limit))


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("no-such-host.invalid", "host 'no-such-host.invalid' is unknown"),
        ("203.0.113.7", "host 203.0.113.7 is not an address of this machine"),
        ("a" * 70 + ".example", "cannot be used"),
    ],
)
def test_a_host_that_cannot_be_used_is_one_line(
    host: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/no/such/model", "--host", host, "--insecure", "--port", "0"]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


@rest(SECONDS)
def test_a_low_limit_of_open_files_ends_the_program_with_one_line() -> None:
    done = subprocess.run(
        [*COMMAND, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        preexec_fn=files(16),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("aioinfer: the limit of open files (ulimit -n) is 16")
    assert done.stderr.count("\n") == 1, done.stderr


@rest(PROGRAM)
@pytest.mark.native  # without, there is one more line
def test_health_is_reachable_within_a_low_limit_of_open_files() -> None:
    """More half-open connections than the limit has files."""
    command = [*COMMAND, "--port", "0"]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=files(128)) as process,
        contextlib.ExitStack() as stack,
    ):
        try:
            assert process.stdout is not None
            port = next(
                int(line.split()[2].rsplit(":", 1)[1]) for line in process.stdout if "Serving" in line
            )
            for _ in range(200):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=120))
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            connection.close()
            process.send_signal(signal.SIGTERM)
            _, stderr = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0
    assert stderr.count("\n") == 1, stderr
    assert "connections are open: an idle one was closed" in stderr


def test_a_port_in_use_is_found_before_the_model_is_read(
    taken: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "/no/such/model", "--port", str(taken)]) == 2
    assert capsys.readouterr().err == f"aioinfer: port {taken} of host 127.0.0.1 is in use\n"


def test_too_few_open_files_for_connections_are_found_before_the_model_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """More than any command needs, and less than these with what is spared, whatever else is open."""
    limit = 80
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(open(os.devnull))
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        assert main(["serve", "/no/such/model", "--port", "0"]) == 2
    assert f"(ulimit -n {limit}) leaves none for connections" in capsys.readouterr().err


# -- the log line ---------------------------------------------------------------------------------------


@pytest.fixture
def root() -> Iterator[logging.Logger]:
    """The root logger, whose level and that of the line are put back."""
    root = logging.getLogger()
    before = root.level, STATS.level
    yield root
    root.setLevel(before[0])
    STATS.setLevel(before[1])


@pytest.mark.parametrize(
    ("level", "interval", "expected", "shown"),
    [
        ("WARNING", None, 10.0, True),
        ("INFO", None, 10.0, True),
        ("ERROR", None, 10.0, False),
        ("WARNING", 2.5, 2.5, True),
        ("WARNING", 0.0, 0.0, False),
        ("INFO", 0.0, 0.0, True),  # but nothing logs one
    ],
)
def test_the_line_is_logged_unless_it_is_switched_off(
    root: logging.Logger, level: str, interval: float | None, expected: float, shown: bool
) -> None:
    root.setLevel(level)
    STATS.setLevel(logging.NOTSET)
    config = _as_server(EngineConfig(stats_interval=interval))
    assert config.stats_interval == expected
    assert STATS.isEnabledFor(logging.INFO) is shown


@pytest.mark.parametrize(("asked", "expected"), [(None, 3e-4), (0.0, 0.0), (1e-3, 1e-3)])
def test_a_server_has_a_short_switch_interval_unless_another_is_asked_for(
    asked: float | None, expected: float
) -> None:
    assert _as_server(EngineConfig(switch_interval=asked, stats_interval=0.0)).switch_interval == expected


# -- sockets -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.EACCES, "port 80 of host 127.0.0.1 may not be used: Permission denied"),
        (errno.EPERM, "port 80 of host 127.0.0.1 may not be used"),
        (errno.EMFILE, "cannot listen on port 80 of host 127.0.0.1: Too many open files"),
    ],
)
async def test_an_error_of_a_socket_names_port_and_host(
    monkeypatch: pytest.MonkeyPatch, number: int, message: str
) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError, match=message):
        await bind("127.0.0.1", 80)


async def test_all_addresses_of_a_host_get_the_same_port() -> None:
    sockets = await bind("localhost", 0)
    try:
        assert len({each.getsockname()[1] for each in sockets}) == 1
        assert len({each.family for each in sockets}) == len(sockets)
    finally:
        for each in sockets:
            each.close()


async def test_an_address_that_the_machine_lacks_does_not_prevent_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """IPv6 may be switched off although a host has such an address."""
    loop = asyncio.get_running_loop()
    good = await loop.getaddrinfo("127.0.0.1", 0, type=socket.SOCK_STREAM)
    bad = [(*good[0][:4], ("203.0.113.7", 0))]

    async def both(*arguments: object, **options: object) -> list[object]:
        return [*bad, *good]

    class Loop:
        getaddrinfo = staticmethod(both)

    monkeypatch.setattr(asyncio, "get_running_loop", Loop)
    sockets = await bind("both", 0)
    assert [each.getsockname()[0] for each in sockets] == ["127.0.0.1"]
    sockets[0].close()


async def test_a_port_taken_while_the_model_loads_is_the_same_error() -> None:
    """Two programs that start at the same time can both bind, and one of them listens first."""
    sockets = await bind("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    other = (await bind("127.0.0.1", port))[0]
    other.listen()
    engine = make_engine()
    with pytest.raises(ConfigError, match=f"port {port} of host 127.0.0.1 is in use"):
        await serve(engine, ServerConfig(), sockets=sockets)
    assert not engine.ready
    assert sockets[0].fileno() == -1
    other.close()


@rest(SECONDS)
@pytest.mark.usefixtures("thawed")
def test_what_was_imported_is_frozen_while_the_server_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection over the objects of torch and transformers would hold up the loop."""
    seen: list[bool] = []

    async def serve(*arguments: object, **options: object) -> None:
        seen.append(frozen())

    monkeypatch.setattr("aioinfer.server.serve", serve)
    assert not frozen()
    assert main(["serve", "tiny-chat", "--port", "0"]) == 0
    assert seen == [True]
    assert not frozen()
