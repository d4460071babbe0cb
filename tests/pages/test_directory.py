"""A directory of pages: private, bounded, shared, and whatever a disk does."""

from __future__ import annotations

import errno
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from aioinfer.errors import ConfigError
from aioinfer.system.locks import lock_file
from aioinfer.tiers import records
from aioinfer.tiers.archive import ArchiveError, ArchiveWriter
from aioinfer.tiers.directory import DirectoryStore
from aioinfer.tiers.records import HEADER
from tests.pages.content import PAGE, name_of, page_of, read_right, state_of
from tests.tiers import PROGRAM, rest, scaled

NAMES = [name_of(number) for number in range(40)]
SIZE = PAGE + HEADER
MOST = 1 << 20
ROOT = os.geteuid() == 0


def files(path: Path) -> list[Path]:
    return [each for each in path.rglob("*") if each.is_file()]


def filled(path: Path, count: int = 4, most: int = MOST) -> DirectoryStore:
    store = DirectoryStore(path, most)
    for name in NAMES[:count]:
        assert store.put(name, page_of(name))
    return store


# -- private -------------------------------------------------------------------------------------------------


def test_what_is_made_is_this_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        filled(tmp_path / "over" / "pages")
    finally:
        os.umask(before)
    for each in (tmp_path / "over" / "pages").rglob("*"):
        assert each.stat().st_mode & 0o777 == (0o700 if each.is_dir() else 0o600), each
    assert (tmp_path / "over" / "pages").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_is_open_to_others_is_taken_over_only_while_it_is_empty(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    path.mkdir()
    path.chmod(0o777)
    assert filled(path).leading(NAMES) == 4
    assert path.stat().st_mode & 0o777 == 0o700
    path.chmod(0o750)
    with pytest.raises(ConfigError, match=r"open to others \(mode 750\).*chmod 700"):
        DirectoryStore(path, MOST)
    assert path.stat().st_mode & 0o777 == 0o750


def test_links_and_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="symbolic link"):
        DirectoryStore(tmp_path / "link", MOST)
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="cannot be a directory of pages"):
            DirectoryStore(path, MOST)
    (tmp_path / "there" / "3f").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="3f is no directory of this user"):
        DirectoryStore(tmp_path / "there", MOST)


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = filled(tmp_path / "pages")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"another user \(uid \d+, this is 12345\)"):
        DirectoryStore(tmp_path / "pages", MOST)
    assert read_right(store, NAMES) == 0, "files of another user were read"
    assert store.counts().misses == {"owner": 1}
    monkeypatch.undo()
    assert read_right(DirectoryStore(tmp_path / "pages", MOST), NAMES) == 4


# -- shared, and found again ---------------------------------------------------------------------------------


def test_pages_are_found_after_a_restart_in_the_order_of_their_use(tmp_path: Path) -> None:
    now = [1e9]
    store = DirectoryStore(tmp_path, 4 * SIZE, clock=lambda: now[0])
    for name in NAMES[:4]:
        assert store.put(name, page_of(name))
    for name in (NAMES[2], NAMES[0], NAMES[3], NAMES[1]):
        os.utime(store._path + f"/{name.hex()[:2]}/{name.hex()}.p", (now[0], now[0]))
        now[0] += 1
    now[0] += 100
    assert read_right(store, NAMES[2:3]) == 1  # which is now the youngest
    store.close()
    store = DirectoryStore(tmp_path, 4 * SIZE)
    assert store.leading(NAMES) == 4
    for name in NAMES[10:13]:
        assert store.put(name, page_of(name))
    assert [at for at, name in enumerate(NAMES) if store.has(name)] == [2, 10, 11, 12]
    assert DirectoryStore(tmp_path, 2 * SIZE).counts().records == 2, "a smaller bound"


def test_what_is_known_is_not_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, looks = DirectoryStore(tmp_path, MOST), DirectoryStore(tmp_path, MOST), list[str]()
    for name in NAMES[:6]:
        one.put(name, page_of(name))
    other.refresh(NAMES[:6])
    stat = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **options: looks.append(path) or stat(path, **options))
    other.refresh(NAMES[:6])
    assert looks == []
    assert other.leading(NAMES) == 6


def test_another_process_finds_pages_when_it_looks(tmp_path: Path) -> None:
    one, other = DirectoryStore(tmp_path, MOST), DirectoryStore(tmp_path, MOST)
    for name in NAMES[:6]:
        assert one.put(name, page_of(name), state_of(name) if name == NAMES[2] else None)
    assert other.leading(NAMES) == 0
    assert read_right(other, NAMES[:1]) == 1, "read looks at the disk"
    other.refresh(NAMES[:4], states=True)
    assert (other.leading(NAMES), other.leading(NAMES, states=True)) == (4, 3)
    other.refresh()
    assert other.leading(NAMES) == 6
    shutil.rmtree(tmp_path / NAMES[3].hex()[:2])
    assert read_right(other, NAMES) == 3
    assert other.counts().misses == {"vanished": 1}
    assert one.leading(NAMES) == 6
    one.refresh()
    assert one.leading(NAMES) == 3
    assert one.put(NAMES[3], page_of(NAMES[3]))
    assert read_right(other, NAMES) == 6


def test_a_put_of_what_another_process_has_removed_writes_it(tmp_path: Path) -> None:
    one, other = filled(tmp_path), DirectoryStore(tmp_path, MOST)
    for each in files(tmp_path):
        if each.suffix == ".p":
            each.unlink()
    assert one.put(NAMES[0], page_of(NAMES[0]))
    assert read_right(other, NAMES) == 1


def test_what_another_process_uses_is_not_evicted(tmp_path: Path) -> None:
    one = filled(tmp_path, 4, 4 * SIZE)
    other = DirectoryStore(tmp_path, 4 * SIZE)
    assert other.put(NAMES[0], page_of(NAMES[0]))  # counts as a use
    one._unseen = -MOST  # it does not look
    assert one.put(NAMES[4], page_of(NAMES[4]))
    assert [at for at, name in enumerate(NAMES) if one.has(name)] == [0, 2, 3, 4]


def test_two_stores_keep_one_bound(tmp_path: Path) -> None:
    draw = random.Random(44)
    stores = [DirectoryStore(tmp_path, 16 * SIZE) for _ in range(2)]
    for _ in range(scaled(400)):
        store, name = draw.choice(stores), draw.choice(NAMES)
        if not read_right(store, [name]):
            assert store.put(name, page_of(name))
        assert sum(each.stat().st_size for each in files(tmp_path)) <= 18 * SIZE
    for store in stores:
        store.refresh()
        assert store.counts().bytes <= 16 * SIZE
    assert all(store.counts().evicted for store in stores)


def test_a_put_during_a_read_of_the_same_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = filled(tmp_path, 1), DirectoryStore(tmp_path, MOST)
    path = Path(one._path, NAMES[0].hex()[:2], f"{NAMES[0].hex()}.p")

    def reading(*arguments: Any, real: Any = records.read_record) -> str:
        path.unlink()
        assert other.put(NAMES[0], page_of(NAMES[0]))
        return str(real(*arguments))

    monkeypatch.setattr("aioinfer.tiers.directory.read_record", reading)
    assert read_right(one, NAMES) == 1


# -- what a disk does ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS])
@pytest.mark.parametrize("call", ["pwritev", "open", "replace"])
def test_a_disk_that_takes_nothing_refuses_pages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    call: str,
    number: int,
) -> None:
    store = filled(tmp_path, 8)

    real = getattr(os, call)

    def failing(*arguments: Any, **named: Any) -> Any:
        if call == "open" and "writing" not in str(arguments[0]):
            return real(*arguments, **named)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, failing)
    for name in NAMES[8:]:
        assert not store.put(name, page_of(name))
    refused = store.counts().refused
    assert refused.keys() == {errno.errorcode[number], "paused"}
    assert refused["paused"] > 2 * refused[errno.errorcode[number]], "it tries again and again"
    assert len(caplog.records) == 1
    assert [each for each in files(tmp_path) if each.suffix not in (".p", ".lock")] == []
    monkeypatch.undo()
    while not store.put(NAMES[20], page_of(NAMES[20])):
        pass
    for name in NAMES[21:]:
        assert store.put(name, page_of(name)), "it went on to pause"
    store.refresh()
    assert store.counts().bytes == sum(each.stat().st_size for each in files(tmp_path))


def test_a_disk_that_cannot_be_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(tmp_path)

    def failing(*arguments: Any) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", failing)
    assert [read_right(store, [name]) for name in NAMES[:4]] == [0] * 4
    assert store.counts().misses == {"EIO": 4}
    assert len(caplog.records) == 1
    monkeypatch.undo()
    store.refresh()
    assert read_right(store, NAMES) == 4


def test_files_that_are_read_and_written_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)

    def part(views: list[memoryview]) -> list[memoryview]:
        return [views[0][: draw.randint(1, len(views[0]))]]

    def read(file: int, views: Any, offset: int, real: Any = os.preadv) -> Any:
        return real(file, part(views), offset)

    def write(file: int, views: Any, offset: int, real: Any = os.pwritev) -> Any:
        return real(file, part(views), offset)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "pwritev", write)
    assert read_right(filled(tmp_path, 3), NAMES) == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, which only root can mount."""
    place = tmp_path / "disk"
    place.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], capture_output=True)
    if done.returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True)


@rest(PROGRAM)
def test_a_file_system_that_is_full_or_read_only(small_disk: Path) -> None:
    store = DirectoryStore(small_disk / "pages", MOST)
    kept = sum(store.put(name, page_of(name)) for name in NAMES)
    assert 5 < kept < 40
    assert store.counts().refused.keys() == {"ENOSPC", "paused"}
    assert store.counts().evicted > 0, "old pages make room on a full disk"
    there = [name for name in NAMES if store.has(name)]
    assert all(read_right(store, [name]) for name in there)
    store.close()

    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    store = DirectoryStore(small_disk / "pages", MOST)
    assert [name for name in NAMES if store.has(name)] == there
    assert all(read_right(store, [name]) for name in there)
    new = [name for name in NAMES if name not in there]
    assert not any(store.put(name, page_of(name)) for name in new)
    assert store.put(there[0], page_of(there[0])), "it is there"
    assert store.counts().refused.keys() == {"EROFS", "paused"}
    smaller = DirectoryStore(small_disk / "pages", 2 * SIZE)
    assert not smaller.put(new[0], page_of(new[0]))
    with pytest.raises(ConfigError, match="Read-only"):
        DirectoryStore(small_disk / "other", MOST)
    with pytest.raises(ArchiveError, match="Read-only"):
        ArchiveWriter(small_disk / "archive", {})
    store.refresh()
    subprocess.run(["mount", "-o", "remount,rw", small_disk], check=True)
    while not store.put(there[1], page_of(there[1])):
        pass


@pytest.mark.skipif(ROOT, reason="root may write to any directory; a file system for reading stands in above")
def test_a_directory_without_the_right_to_write(tmp_path: Path) -> None:
    filled(tmp_path / "pages").close()
    (tmp_path / "pages").chmod(0o500)
    try:
        store = DirectoryStore(tmp_path / "pages", MOST)
        assert read_right(store, NAMES) == 4
        assert not store.put(NAMES[9], page_of(NAMES[9]))
        assert store.counts().refused == {"EACCES": 1}
    finally:
        (tmp_path / "pages").chmod(0o700)


@pytest.mark.parametrize("how", ["moved", "removed", "replaced"])
def test_a_directory_that_vanishes_and_comes_back(tmp_path: Path, how: str) -> None:
    path, away = tmp_path / "pages", tmp_path / "away"
    store = filled(path)
    path.rename(away)
    if how != "moved":
        shutil.rmtree(away)
    if how == "replaced":
        path.mkdir(mode=0o755)
        (path / "file of others").touch()
    store.refresh()
    assert store.leading(NAMES) == 0
    for name in NAMES[:8]:
        assert not store.put(name, page_of(name)) or how == "moved"
    assert not path.exists() or [*path.iterdir()] == [path / "file of others"], "nothing is made there"
    if how == "moved":
        away.rename(path)
    elif how == "removed":
        path.mkdir(mode=0o700)
    else:
        (path / "file of others").unlink()
    store.refresh()
    assert (store.leading(NAMES) >= 4) == (how == "moved")
    assert store.put(NAMES[9], page_of(NAMES[9]))
    assert read_right(DirectoryStore(path, MOST), NAMES[9:]) == 1
    store.close()
    del store
    assert not any("writing" in each.name for each in path.iterdir())


def test_a_place_for_writing_that_was_removed_is_made_again(tmp_path: Path) -> None:
    store = filled(tmp_path)
    for each in tmp_path.glob("writing-*"):
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    assert store.put(NAMES[9], page_of(NAMES[9]))
    for each in tmp_path.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()
    assert store.put(NAMES[10], page_of(NAMES[10]))
    assert read_right(store, [NAMES[10]]) == 1


def test_a_file_system_without_locks_is_read_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path)

    def none(path: object, dir_fd: int) -> int:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("aioinfer.tiers.folder.lock_file", none)
    store = DirectoryStore(tmp_path, MOST)
    assert read_right(store, NAMES) == 4
    assert not store.put(NAMES[9], page_of(NAMES[9]))
    assert store.counts().refused == {"ENOLCK": 1}


def test_left_overs_go_and_what_is_in_use_stays(tmp_path: Path) -> None:
    store = filled(tmp_path)
    dead, busy = tmp_path / f"writing-{'a' * 16}", tmp_path / f"writing-{'b' * 16}"
    for each in (dead, busy):
        each.mkdir()
        (each / "0").write_bytes(b"part")
    held = lock_file(f"{busy}.lock")
    Path(f"{dead}.lock").touch()
    other = DirectoryStore(tmp_path, MOST)
    assert not dead.exists()
    assert not Path(f"{dead}.lock").exists()
    assert (busy / "0").exists()
    assert store.put(NAMES[9], page_of(NAMES[9])), "the place of a living store was removed"
    os.close(held)
    other.refresh()
    assert not busy.exists()
    store.close()
    del store
    assert [each.name for each in tmp_path.glob("writing-*")] == []


def test_closing_while_others_write_leaves_nothing(tmp_path: Path) -> None:
    for seed in range(scaled(40)):
        store = DirectoryStore(tmp_path, 8 * SIZE)
        begun = threading.Event()

        def work(number: int, store: DirectoryStore = store, begun: threading.Event = begun) -> None:
            for name in random.Random(number).sample(NAMES, 20):
                store.put(name, page_of(name))
                read_right(store, [name])
                begun.set()

        threads = [threading.Thread(target=work, args=(2 * seed + at,)) for at in range(2)]
        for thread in threads:
            thread.start()
        begun.wait()
        store.close()
        for thread in threads:
            thread.join()
        del store, work, threads, thread
        assert [each.name for each in tmp_path.glob("writing-*")] == []


@rest(PROGRAM)
def test_killed_processes_leave_nothing_and_spoil_nothing() -> None:
    command = [sys.executable, "-m", "tests.pages.killing", "--kills", str(scaled(1000)), "--seed", "44"]
    done = subprocess.run(command, capture_output=True, text=True)
    with suppress(ValueError):
        assert int(done.stdout.split()[0]) >= scaled(1000)
    assert done.returncode == 0, done.stdout + done.stderr
