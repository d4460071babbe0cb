"""What is in the cache of compiled kernels is loaded only if it is whole, and nothing piles up there.

Most tests use scripts as compilers.
"""

from __future__ import annotations

import errno
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aioinfer.native import bindings
from aioinfer.native.build import UNITS, BuildFailed, build, cache_directory
from tests.native.compilers import WORKS, Compiler, alive, calls, left

_ROOT = Path(__file__).parents[2]
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "flipped": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
    "longer": lambda content: content + b"x",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_was_damaged_is_compiled_again(compiler: Compiler, damage: str) -> None:
    script = compiler(WORKS)
    path = build()
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert build() == path
    assert path.read_bytes() == whole
    assert calls(script) == 2 * (UNITS + 1)
    assert left() == [".so"]


def test_a_damaged_library_of_another_name_is_not_loaded_either(compiler: Compiler) -> None:
    """As a copy of the cache may bring along. The one that is whole is found beside it."""
    script = compiler(WORKS)
    path = build()
    (path.parent / f"{path.stem.rpartition('-')[0]}-{'0' * 16}.so").write_bytes(path.read_bytes())
    assert build() == path
    assert calls(script) == UNITS + 1
    assert left() == [".so"]


def test_a_damaged_library_in_a_cache_that_cannot_be_written_is_an_error(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(WORKS)
    path = build()
    path.write_bytes(b"")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", refuse)
    with pytest.raises(BuildFailed, match=r"cannot be written: .*Permission denied"):
        build()


@pytest.mark.parametrize(
    "script", [None, "\nexit 1", WORKS.replace("fake 1", "fake 2")], ids=["none", "broken", "another"]
)
def test_without_its_compiler_a_library_is_used_where_it_is(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, script: str | None
) -> None:
    """With another compiler it is not: what that one makes may be better."""
    compiler(WORKS)
    path = build()
    if script is None:
        monkeypatch.setenv("AIOINFER_CXX", "no-such-compiler")
    else:
        compiler(script)
    assert (build() == path) is (script is None or "exit 1" in script)


def test_without_a_compiler_no_damaged_library_is_used(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(WORKS)
    build().write_bytes(b"damaged")
    monkeypatch.setenv("AIOINFER_CXX", "no-such-compiler")
    with pytest.raises(BuildFailed, match="there is no compiler"):
        build()


def test_a_library_reaches_the_disk_before_it_has_its_name(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(WORKS)
    events: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (events.append("sync"), sync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (events.append("replace"), replace(*paths)))
    build()
    assert events == ["sync", "replace", "sync"]


def test_a_full_disk_is_named_and_leaves_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(WORKS)

    def full(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BuildFailed, match="No space left on device"):
        build()
    assert left() == []


def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(compiler: Compiler) -> None:
    compiler(WORKS)
    cache = cache_directory()
    cache.mkdir()
    ages = {"dead": 7200, "compiling": 1000}
    for name, age in ages.items():
        place = cache / f"compiling-{name}"
        place.mkdir()
        (place / "0.o").write_text("")
        os.utime(place, (time.time() - age,) * 2)
    build()
    assert [path.name for path in cache.glob("compiling-*")] == ["compiling-compiling"]


def age(path: Path, days: dict[str, float]) -> None:
    """Old libraries beside this one, by name the days since their last use."""
    for name, since in days.items():
        old = path.parent / f"kernels-{name}.so"
        old.write_bytes(b"old")
        os.utime(old, (time.time() - since * 86400,) * 2)


@pytest.mark.parametrize(
    ("days", "kept"),
    [
        ({"a": 400, "b": 300, "c": 200, "d": 100, "e": 60, "f": 20, "g": 10}, "fg"),
        ({"a": 9000, "b": 8000, "c": 7000, "d": 6000}, "cd"),
    ],
    ids=["unused", "few"],
)
def test_libraries_that_were_not_used_for_long_are_removed_but_for_the_newest(
    compiler: Compiler, days: dict[str, float], kept: str
) -> None:
    """When another one is compiled. One that is looked up is in use."""
    script = compiler(WORKS)
    path = build()
    age(path, days)
    (path.parent / "kernels-other.txt").write_text("not a library")
    for each in (path, path.parent / "kernels-other.txt"):
        os.utime(each, (0, 0))
    assert build() == path
    assert calls(script) == UNITS + 1
    assert left().count(".so") == 1 + len(days), "a start that compiles nothing removes nothing"
    compiler(WORKS.replace("fake 1", "fake 2"))
    libraries = {path.name, build().name, *(f"kernels-{name}.so" for name in kept)}
    assert {each.name for each in path.parent.glob("kernels-*")} == {*libraries, "kernels-other.txt"}


def test_kernels_of_a_file_system_for_reading_only_are_used(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of this compiler, and those of another one where it cannot compile."""
    script = compiler(WORKS)
    path = build()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("utime", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    assert build() == path
    compiler(WORKS.replace("fake 1", "fake 2"))
    assert build() == path
    assert calls(script) == UNITS + 1


def test_a_library_that_another_process_removes_meanwhile_is_no_error(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(WORKS)
    path = build()
    age(path, dict.fromkeys("abcdef", 400))
    unlink = Path.unlink

    def late(self: Path, missing_ok: bool = False) -> None:
        unlink(self)
        unlink(self)

    compiler(WORKS.replace("fake 1", "fake 2"))
    monkeypatch.setattr(Path, "unlink", late)
    assert build().is_file()
    assert len(list(path.parent.glob("kernels-*.so"))) == 4


def test_what_progress_raises_ends_the_compilers_and_leaves_nothing(
    compiler: Compiler, tmp_path: Path
) -> None:
    """This is how a start is cancelled. It is asked again and again while compilers run, which start other
    processes: g++ does so."""
    workers = tmp_path / "workers"
    compiler(f'\n[ "$1" = --version ] && exit\nsleep 100 & echo $! >> "{workers}"; wait')

    def progress(done: int, total: int) -> None:
        if workers.exists() and len(workers.read_text().split()) == UNITS:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(progress)
    for worker in workers.read_text().split():
        while alive(int(worker)):
            pass
    assert left() == []


def test_a_process_that_waits_for_the_kernels_of_another_thread_can_be_ended(
    compiler: Compiler, unsettled: None
) -> None:
    """The thread that compiles goes on, and the question stays open for those that come later."""
    compiler(WORKS)

    def progress(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with bindings._loading, pytest.raises(KeyboardInterrupt):
        bindings.native_unsupported(progress)
    assert bindings._loaded is None
    with pytest.raises(KeyboardInterrupt):
        bindings.native_unsupported(progress)
    assert bindings._loaded is None
    assert left() == []
