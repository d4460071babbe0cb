"""Unix sockets: who may connect, whose a path is, and what is left of it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aioinfer.cli.main import main
from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError
from aioinfer.server.http.unix import UnixSocket
from tests.server.conftest import Serving
from tests.server.test_adversity import ENDLESS
from tests.tiers import SECONDS, rest


@pytest.fixture
def path() -> Iterator[Path]:
    """Short: the directories of pytest are longer than a socket's path may be."""
    with tempfile.TemporaryDirectory(prefix="aioinfer") as directory:
        yield Path(directory, "s")


def bits_of(path: Path | str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


async def test_a_server_on_a_unix_socket(serving: Serving, path: Path) -> None:
    async with serving(server={"uds": str(path)}) as served:
        assert served.url == f"unix:{path}"
        assert bits_of(path) == 0o600
        for host in ("localhost", "llm.example"):  # a proxy passes on any name
            reply = await served.post("/v1/completions", {**ENDLESS, "max_tokens": 3}, Host=host)
            assert reply.text.endswith("data: [DONE]\n\n")
        assert (await served.get("/v1/models", Origin="https://evil.example")).status == 403
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize(("mode", "bits"), [("660", 0o660), ("0666", 0o666)])
async def test_permissions(serving: Serving, path: Path, mode: str, bits: int) -> None:
    before = os.umask(0o077)
    try:
        async with serving(server={"uds": str(path), "uds_mode": mode}):
            assert bits_of(path) == bits
            assert bits_of(f"{path}.lock") == 0o600
    finally:
        assert os.umask(before) == 0o077, "the umask belongs to the whole process"


@pytest.mark.parametrize("mode", ["", "rw", "999", "6600", "-60", "66"])
def test_permissions_are_three_octal_digits(mode: str) -> None:
    with pytest.raises(ConfigError, match="uds_mode"):
        ServerConfig(uds_mode=mode)


@rest(SECONDS)
def test_a_stale_socket_is_replaced(path: Path) -> None:
    """As a process leaves it that was killed: the socket, and its lock."""
    code = (
        "import os, sys; from aioinfer.server.http.unix import UnixSocket\n"
        "UnixSocket(sys.argv[1], 0o600).socket.listen(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code, str(path)], check=True)
    assert sorted(os.listdir(path.parent)) == ["s", "s.lock"]
    with closing(UnixSocket(str(path), 0o600)) as mine:
        mine.socket.listen()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
    assert os.listdir(path.parent) == []


def test_a_socket_that_another_program_listens_on_is_left_alone(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        other.listen(1)
        other.setblocking(False)
        with pytest.raises(ConfigError, match="in use"):
            UnixSocket(str(path), 0o600)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert os.listdir(path.parent) == ["s"]
        path.unlink()


def test_a_socket_of_a_server_that_loads_its_model_is_in_use(path: Path) -> None:
    """Bound, and nobody listens yet: as stale ones look."""
    with closing(UnixSocket(str(path), 0o600)) as mine:
        inode = path.lstat().st_ino
        with pytest.raises(ConfigError, match="in use"):
            UnixSocket(str(path), 0o600)
        assert path.lstat().st_ino == inode
        mine.socket.listen()
        with pytest.raises(ConfigError, match="in use"):
            UnixSocket(str(path), 0o600)
    with closing(UnixSocket(str(path), 0o600)):
        pass


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_no_other_file_is_removed(path: Path, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "target"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        target.write_text("precious")
        path.symlink_to(target)
    with pytest.raises(ConfigError, match="exists and is no socket"):
        UnixSocket(str(path), 0o600)
    assert os.listdir(path.parent) == ["s"]
    if kind == "directory":
        path.rmdir()
    else:
        assert path.read_text() == "precious"


def test_a_file_that_took_the_place_of_the_socket_is_kept(path: Path) -> None:
    with closing(UnixSocket(str(path), 0o600)):
        path.unlink()
        path.write_text("another's")
    assert path.read_text() == "another's"


def test_a_link_in_the_place_of_the_lock_is_not_followed(path: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    Path(f"{path}.lock").symlink_to(victim)
    with pytest.raises(ConfigError, match="cannot listen on the socket"):
        UnixSocket(str(path), 0o600)
    assert not victim.exists()


@pytest.mark.parametrize(
    ("uds", "message"),
    [
        ("/no/such/directory/s", "cannot listen on the socket /no/such/directory/s: No such file"),
        ("/tmp/" + "x" * 120, "a path of more than 103 bytes"),
    ],
)
def test_a_path_that_cannot_be_used_is_found_before_the_model_is_read(
    uds: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--uds", "--admin-uds"):
        assert main(["serve", "/no/such/model", "--port", "0", flag, uds]) == 2
        complaint = capsys.readouterr().err
        assert message in complaint
        assert complaint.count("\n") == 1


def test_a_start_that_fails_leaves_no_socket(path: Path) -> None:
    assert main(["serve", "/no/such/model", "--uds", str(path)]) == 2
    assert os.listdir(path.parent) == []
