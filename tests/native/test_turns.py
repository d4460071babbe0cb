"""One process at a time makes a file."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path

import pytest

from aioinfer.native.turns import turn


def never() -> None:
    raise AssertionError("it waits")


def test_a_later_turn_waits_and_leaves_nothing(tmp_path: Path) -> None:
    lock, waits, order = tmp_path / "new" / "lock", threading.Event(), list[str]()

    def later() -> None:
        with turn(lock, waits.set):
            order.append("later")

    with turn(lock, never):
        thread = threading.Thread(target=later)
        thread.start()
        assert waits.wait(60)
        order.append("first")
    thread.join()
    assert order == ["first", "later"]
    assert not lock.exists()
    assert lock.parent.stat().st_mode & 0o022 == 0


def test_what_is_raised_while_waiting_is_raised(tmp_path: Path) -> None:
    def leave() -> None:
        raise BrokenPipeError  # an OSError, as those of files are

    lock = tmp_path / "lock"
    with turn(lock), pytest.raises(BrokenPipeError), turn(lock, leave):
        never()
    assert not lock.exists()


def test_a_child_that_was_forked_meanwhile_holds_nothing(tmp_path: Path) -> None:
    with turn(tmp_path / "lock"):
        child = os.fork()
        if not child:
            signal.pause()
    try:
        with turn(tmp_path / "lock", never):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_file_that_was_removed_is_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder has removed it between opening and locking, and another one may hold a new file."""
    lock, flock, locked = tmp_path / "lock", fcntl.flock, list[int]()

    def replaced(opened: int, operation: int) -> None:
        if not locked:
            (tmp_path / "new").touch()
            os.replace(tmp_path / "new", lock)
        flock(opened, operation)
        locked.append(os.fstat(opened).st_ino)

    monkeypatch.setattr("fcntl.flock", replaced)
    with turn(lock, never):
        first, second = locked
        assert first != second == os.stat(lock).st_ino
    assert not lock.exists()


def test_where_nothing_can_be_written_no_process_waits(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with turn(tmp_path / "file" / "lock", never), turn(tmp_path / "file" / "lock", never):
        pass
