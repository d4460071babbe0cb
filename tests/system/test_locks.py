"""Locks of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from aioinfer.system import locks
from aioinfer.system.locks import lock, lock_file, unlock


def test_a_lock_has_one_holder_until_it_is_closed(tmp_path: Path) -> None:
    held = lock_file(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock")
    unlock(held)
    other = lock_file(tmp_path / "lock")
    os.close(held)
    with pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock")
    os.close(other)
    os.close(lock_file(tmp_path / "lock"))


def test_attempts_leave_no_file_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, closed = list[int](), list[int]()

    def opening(*arguments: object, real: object = os.open, **named: object) -> int:
        opened.append(real(*arguments, **named))  # type: ignore[operator]
        return opened[-1]

    def closing(number: int, real: object = os.close) -> None:
        closed.append(number)
        real(number)  # type: ignore[operator]

    held = lock_file(tmp_path / "lock")
    monkeypatch.setattr(locks.os, "open", opening)
    monkeypatch.setattr(locks.os, "close", closing)
    with pytest.raises(BlockingIOError):
        lock_file(tmp_path / "lock")
    monkeypatch.undo()
    os.close(held)
    assert opened == closed != []


def test_a_system_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    with (tmp_path / "file").open("wb") as file, pytest.raises(OSError, match="No locks"):
        lock(file.fileno())
