"""Standard streams that are closed, full or read by nobody end no server, and no command with a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aioinfer.cli.main import main
from tests.ports import free_port
from tests.tiers import PROGRAM, SECONDS, grid, nightly, points, rest

COMMAND = f"{sys.executable} -m aioinfer"
#: what a shell makes of standard streams
BROKEN = ["<&-", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full", "2>/dev/full", ">/dev/full 2>&1"]
#: all of them at once, which fail in the same places as one
SERVED = ["<&- >&- 2>&-", ">/dev/full 2>&1"]


def shell(command: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=240,
        **options,  # type: ignore[call-overload]
    )


@contextmanager
def served(streams: str, *options: str, before: str = "") -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A server that answers. Without one, an AssertionError."""
    port = free_port()
    command = f"{before} exec {COMMAND} serve --threads 1 --port {port} {' '.join(options)} {streams}"
    process = subprocess.Popen(["bash", "-c", command], stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        while not answers(url):
            assert process.poll() is None, f"it has ended with {process.returncode}"
        yield process, url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=10) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@rest(PROGRAM)
@pytest.mark.parametrize("streams", grid(SERVED, [*BROKEN[:4], *BROKEN[5:7], "> >(exit) 2>&1"]))
def test_a_server_starts_answers_and_drains_whatever_its_streams_are(streams: str) -> None:
    """Without a terminal, the end of which it is to ignore."""
    options = ["--access-log", "--stats-interval", "0.05"]
    with served(streams, *options, before="trap '' HUP;") as (process, url):
        assert answers(url)
        process.send_signal(signal.SIGHUP)
        assert answers(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@nightly(PROGRAM)
def test_a_log_on_a_disk_that_gets_full_ends_no_server(tmp_path: Path) -> None:
    """A limit of the size of files is a disk of that size, whose error is another one."""
    log = tmp_path / "log"
    limit = "trap '' XFSZ; ulimit -f 1;"
    with served(f">{log} 2>&1", "--access-log", before=limit) as (process, url):
        while log.stat().st_size < 1024:
            assert answers(url)
        assert answers(url)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@nightly(PROGRAM)
def test_the_end_of_its_terminal_drains_a_server() -> None:
    with served(">/dev/null") as (process, _):
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 0


@rest(PROGRAM)
@pytest.mark.parametrize(
    ("command", "status"),
    points(
        [
            (f"{COMMAND} generate 'What is 20 + 22?' --threads 1 | head -c 1", 141),
            (f"echo hello | {COMMAND} chat --threads 1 >/dev/full", 1),
        ],
        [
            (f"{COMMAND} generate 'What is 20 + 22?' --threads 1 --stats 2>/dev/full", 0),
            (f"echo hello | {COMMAND} chat --threads 1 | head -c 1", 141),
            (f"{COMMAND} doctor | exit", 141),
            (f"{COMMAND} generate 'What is 20 + 22?' --threads 1 >/dev/full", 1),
            (f"echo hello | {COMMAND} chat --threads 1 2>/dev/full", 0),
            (f"{COMMAND} chat --threads 1 <&-", 0),
        ],
    ),
)
@pytest.mark.native  # without, there is one more line
def test_a_command_whose_output_is_lost_ends_without_a_traceback(command: str, status: int) -> None:
    done = shell(f"set -o pipefail; {command}")
    said = "aioinfer: standard output: No space left on device\n" if status == 1 else None
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert said is None or done.stderr == said


@rest(SECONDS)
@pytest.mark.parametrize(
    ("command", "status"),
    [
        ("models | :", 141),
        ("models >/dev/full", 1),
        ("key >/dev/full", 1),
        ("models 2>&-", 0),
        ("serve --host 0.0.0.0 2>/dev/full", 2),
        ("serve --host 0.0.0.0 >&- 2>&-", 2),
        ("--help >/dev/full", 0),
        ("replica --socket s --with-parent <&-", 2),
        ("replica --socket s --with-parent </dev/null", 2),
    ],
)
def test_short_commands_keep_their_status(command: str, status: int, tmp_path: Path) -> None:
    done = shell(f"set -o pipefail; {COMMAND} {command}", cwd=tmp_path)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("streams", ["", *BROKEN[:5]])
def test_no_other_file_gets_the_number_of_a_closed_stream(streams: str) -> None:
    code = (
        "from aioinfer.cli.streams import open_streams; import os, sys; open_streams(); "
        "said = [stream.fileno() for stream in (sys.stdin, sys.stdout, sys.stderr)]; "
        "said += [os.get_inheritable(number) for number in range(3)]; "
        "file = os.open('/', 0); sys.exit(not (said == [0, 1, 2, *[True] * 3] and file > 2))"
    )
    assert shell(f'{sys.executable} -c "{code}" {streams}').returncode == 0


class Lost:
    """A stream whose every write fails."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")

    def fileno(self) -> int:
        return os.open(os.devnull, os.O_WRONLY)

    def isatty(self) -> bool:
        return False


@pytest.mark.parametrize(("names", "status"), [(("stdout",), 1), (("stderr",), 0), (("stdout", "stderr"), 1)])
def test_lost_output_is_an_error_and_lost_messages_are_not(
    monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], status: int
) -> None:
    for name in names:
        monkeypatch.setattr(sys, name, Lost())
    assert main(["models"]) == status


def _full(path: Path) -> str:
    return "/dev/full"


def _folder(path: Path) -> str:
    return str(path)


@rest(SECONDS)
@pytest.mark.parametrize("place", [_full, _folder])
def test_a_trace_that_cannot_be_written_is_one_line(
    place: Callable[[Path], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = ["--requests", "1", "--prompt-tokens", "2", "--output-tokens", "2", "--threads", "1"]
    assert main(["bench", *numbers, "--trace", place(tmp_path)]) == 1
    assert capsys.readouterr().err.count("\n") == 1
