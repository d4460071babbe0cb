"""Paths of sockets, and peers that leave."""

from __future__ import annotations

import socket
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from aioinfer.system.sockets import LONGEST_UNIX_PATH, directory_for_sockets, hung_up


@pytest.mark.parametrize("length", [10, 78, 79, 200])
def test_a_directory_has_room_for_the_path_of_a_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    """Wherever temporary files are to be, as in a directory of macOS or of a job of a cluster."""
    usual = Path(tempfile.mkdtemp(dir="/tmp", prefix="x" * max(0, length - 13)))
    monkeypatch.setattr(tempfile, "tempdir", str(usual))
    found = directory_for_sockets("aioinfer-")
    try:
        assert found.stat().st_mode & 0o077 == 0
        assert len(str(found / "socket")) <= LONGEST_UNIX_PATH
        assert (found.parent == usual) == (length <= 78)
    finally:
        found.rmdir()
        usual.rmdir()


def test_a_peer_that_sends_nothing_more_is_noticed_while_data_is_unread() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"unread")
        assert not hung_up(ours)
        theirs.shutdown(socket.SHUT_WR)
        assert hung_up(ours)
        assert ours.recv(10) == b"unread"
    with suppress(OSError, ValueError):
        assert hung_up(ours)
