"""What macOS is asked, in the form of its functions: its answers here are made up."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer.system import low_priority, mac, memory, sockets
from aioinfer.system.memory import Available
from tests.system.other_systems import QUALITY, SYSTEMS

_GIB = 1 << 30


@pytest.fixture
def on_mac(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Functions of the C library of macOS."""
    library = SYSTEMS["darwin"].values["ctypes"]["CDLL"](None)

    def function(name: str) -> Any:
        return getattr(library, name, None)

    for module in (mac, memory):
        monkeypatch.setattr(module, "c_function", function)
    for module in (memory, low_priority):
        monkeypatch.setattr(module, "is_mac", lambda: True)
    return function


def test_memory_and_processor(on_mac: object) -> None:
    assert memory.machine_memory() == 16 * _GIB
    # Free, of files, and purgeable, in pages of 16 KiB.
    assert mac.memory_available() == 16384 * (300_000 + 200_000 + 1_000)
    assert mac.instruction_sets() == "asimd asimdhp atomics asimddp bf16 i8mm"


def test_the_memory_of_the_machine_has_no_groups(on_mac: object, tmp_path: Any) -> None:
    left = memory.memory_available(tmp_path, tmp_path / "none", tmp_path / "none")
    assert left == Available(16384 * 501_000, "machine")


def test_the_memory_of_the_process(on_mac: object) -> None:
    assert memory.process_memory() == 300 << 20


def test_freed_memory_of_all_zones_is_given_back(on_mac: object, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def function(name: str) -> Any:
        return lambda zone, goal: asked.append((name, zone, goal.value))

    monkeypatch.setattr(mac, "c_function", function)
    memory.give_back()
    assert asked == [("malloc_zone_pressure_relief", None, 0)]


def test_what_the_system_does_not_say_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another system, or where a name is gone."""
    monkeypatch.setattr(mac, "c_function", lambda name: None)
    assert (mac.memory(), mac.memory_available(), mac.resident()) == (None, None, None)
    assert mac.instruction_sets() == ""
    mac.lower_quality()


def test_a_thread_of_low_priority_has_a_lower_class(on_mac: object) -> None:
    QUALITY.clear()
    number = low_priority.at_low_priority(threading.get_native_id)
    assert QUALITY.pop(number) == 0x11
    assert not QUALITY, "other threads keep theirs"


def test_a_mac_notices_that_a_peer_has_gone_whatever_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SYSTEMS["darwin"].values["select"].items():
        monkeypatch.setattr(sockets.select, name, value, raising=False)  # type: ignore[attr-defined]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"unread")
        assert not sockets._kqueue_eof(ours.fileno())
        theirs.shutdown(socket.SHUT_WR)
        assert sockets._kqueue_eof(ours.fileno())
    assert sockets._kqueue_eof(ours.fileno()), "closed here"
