"""Processes that share a directory of pages, and are killed at any byte.

::

    python -m tests.pages.killing --kills 1000 --seed 44

In each round two or three processes write, read and evict pages in one directory, and write archives in
another one. Most of them are killed: before, in the middle of or after one of their calls of the system, or
by a timer at any time. Then everything opens, what is read is right, and nothing is left.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from aioinfer.tiers.archive import Archive, ArchiveError, ArchiveWriter, remove_unfinished
from aioinfer.tiers.directory import DirectoryStore
from aioinfer.tiers.records import HEADER
from tests.pages.content import PAGE, name_of, page_of, read_right, state_of

MOST = 20 * (PAGE + HEADER)
NAMES = [name_of(number) for number in range(40)]
KILLED = (-signal.SIGKILL, -signal.SIGALRM)
CALLS = (
    "open",
    "close",
    "mkdir",
    "pwritev",
    "preadv",
    "replace",
    "unlink",
    "utime",
    "stat",
    "ftruncate",
    "fsync",
)


def killed_at(number: int, draw: random.Random) -> None:
    """Have this process end at the call of the system with that number."""
    left = [number]

    def patch(name: str) -> None:
        real: Callable[..., Any] = getattr(os, name)

        def call(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if name == "pwritev":
                    file, views, offset = arguments
                    part = b"".join(views)
                    os.pwrite(file, part[: draw.randrange(len(part) + 1)], offset)
                elif draw.random() < 0.5:
                    with suppress(OSError):
                        real(*arguments, **named)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        setattr(os, name, call)

    for name in CALLS:
        patch(name)


def work(path: Path, archives: Path, seed: int) -> NoReturn:
    draw = random.Random(seed)
    match draw.randrange(4):
        case 0 | 1:
            killed_at(draw.randint(1, 1500), draw)
        case 2:  # at any time, by a signal that nobody handles
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 0.05))
    store = DirectoryStore(path, MOST)
    for _ in range(120):
        at = draw.randrange(len(NAMES))
        if not read_right(store, NAMES[at : at + draw.randint(1, 3)], states=draw.random() < 0.5):
            store.put(NAMES[at], page_of(NAMES[at]), state_of(NAMES[at]) if draw.random() < 0.5 else None)
        if draw.random() < 0.05:
            store.refresh()
        if draw.random() < 0.05:
            archive(archives / f"{draw.randrange(3)}", draw)
    store.close()
    del store
    os._exit(0)


def archive(path: Path, draw: random.Random) -> None:
    with suppress(ArchiveError):  # another process writes it
        writer = ArchiveWriter(path, {"seed": 1})
        for name in draw.sample(NAMES, 3):
            assert writer.put(name, page_of(name), state_of(name))
        writer.finish()


def started(path: Path, archives: Path, seed: int) -> int:
    if pid := os.fork():
        return pid
    try:
        work(path, archives, seed)
    except BaseException as error:
        sys.stderr.write(f"seed {seed}: {error!r}\n")
        os._exit(1)


def judge(path: Path, archives: Path) -> int:
    """Open everything that is left; how many pages were read."""
    store = DirectoryStore(path, MOST)
    remove_unfinished(archives)
    left = [each for each in path.rglob("*") if each.is_file()]
    assert not [each for each in path.iterdir() if "writing" in each.name], (
        "the place of a killed process is left"
    )
    assert all(each.suffix in (".p", ".s") for each in left), left
    assert sum(each.stat().st_size for each in left) <= MOST, "the bound was not kept"
    held = [name for name in NAMES if store.has(name)]
    assert sum(each.suffix == ".p" for each in left) == len(held)
    assert sum(read_right(store, [name]) for name in held) == len(held), "a page was spoiled"
    whole = [name for name in held if store.has_state(name)]
    assert sum(read_right(store, [name], states=True) for name in whole) == len(whole)
    assert not store.counts().misses
    for each in archives.iterdir():
        found = Archive(each)
        assert sum(read_right(found, [name], states=True) for name in NAMES) == 3
    return len(held)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    kills = read = rounds = 0
    folder = Path(tempfile.mkdtemp(prefix="aioinfer-killing-"))
    path, archives = folder / "pages", folder / "archives"
    archives.mkdir()
    os.fsync = lambda fd: None  # what the system has taken outlives a process
    try:
        while kills < options.kills:
            seed = draw.randrange(1 << 32)
            rounds += 1
            sys.stderr.write(f"round {rounds}: seed {seed}\n")
            running = [started(path, archives, seed + at) for at in range(draw.randint(2, 3))]
            for pid in running:
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                assert status in (0, *KILLED), f"a process ended with {status}"
                kills += status in KILLED
            read += judge(path, archives)
            if draw.random() < 0.1:
                shutil.rmtree(path)
    finally:
        shutil.rmtree(folder)
    sys.stdout.write(f"{kills} kills in {rounds} rounds; {read} pages read behind them\n")


if __name__ == "__main__":
    main()
