"""What every store of pages does."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from aioinfer.tiers.archive import Archive, ArchiveWriter
from aioinfer.tiers.directory import DirectoryStore
from aioinfer.tiers.memory import MemoryStore
from aioinfer.tiers.records import HEADER
from aioinfer.tiers.store import PageStore
from tests.pages.content import PAGE, STATE, data_of, empty, name_of, page_of, pieces, read_right, state_of

NAMES = [name_of(number) for number in range(12)]


@pytest.fixture(params=["memory", "directory", "archive"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], PageStore]:
    """Makes a store of some bytes."""

    def made(most: int = 1 << 20) -> PageStore:
        if request.param == "memory":
            return MemoryStore(most)
        if request.param == "directory":
            return DirectoryStore(tmp_path / "pages", most)
        return ArchiveWriter(tmp_path / "archive", {})

    return made


def test_pages_and_states_come_back(make: Any) -> None:
    store = make()
    assert store.leading(NAMES) == 0
    assert read_right(store, NAMES) == 0
    for at, name in enumerate(NAMES[:7]):
        assert store.put(name, page_of(name), state_of(name) if at in (1, 4) else None)
    assert store.leading(NAMES) == 7
    assert store.leading(NAMES, states=True) == 5
    assert [store.has(name) for name in NAMES] == [True] * 7 + [False] * 5
    assert [at for at, name in enumerate(NAMES) if store.has_state(name)] == [1, 4]
    assert read_right(store, NAMES) == 7
    assert read_right(store, NAMES[1:2], states=True) == 1
    assert read_right(store, NAMES[:2], states=True) == 0
    counts = store.counts()
    assert (counts.records, counts.pages_read, counts.pages_written) == (9, 8, 7)
    assert (counts.bytes_read, counts.bytes_written) == (8 * PAGE + STATE, 7 * PAGE + 2 * STATE)
    assert counts.misses == {"absent": 3}
    assert counts.refused == {}


def test_what_is_forgotten_is_a_miss_and_can_be_put_again(make: Any) -> None:
    store = make()
    for name in NAMES[:4]:
        assert store.put(name, page_of(name), state_of(name))
    store.forget([NAMES[2], NAMES[9]])
    assert (store.leading(NAMES), store.has(NAMES[2]), store.has_state(NAMES[2])) == (2, False, False)
    assert read_right(store, NAMES[2:3]) == 0
    counts = store.counts()
    assert (counts.records, counts.evicted) == (6, 0)
    assert store.put(NAMES[2], page_of(NAMES[2]))
    assert read_right(store, NAMES[:4]) == 4
    store.close()
    store.forget(NAMES)


def test_states_are_wanted_page_by_page(make: Any) -> None:
    store = make()
    for name in NAMES[:3]:
        store.put(name, page_of(name), state_of(name) if name == NAMES[2] else None)
    state = empty(STATE)
    assert store.read(NAMES[:3], [empty(), empty(), empty()], [None, None, state]) == 3
    assert b"".join(state) == data_of(NAMES[2], STATE)


def test_a_state_can_be_added_to_a_page(make: Any) -> None:
    store = make()
    assert store.put(NAMES[0], page_of(NAMES[0]))
    assert not store.has_state(NAMES[0])
    assert store.put(NAMES[0], page_of(NAMES[0]), state_of(NAMES[0]))
    assert read_right(store, NAMES[:1], states=True) == 1
    assert store.counts().pages_written == 1, "what was there was written again"


def test_another_size_is_a_miss(make: Any) -> None:
    store = make()
    store.put(NAMES[0], page_of(NAMES[0]))
    assert store.read(NAMES[:1], [empty(PAGE + 1)]) == 0
    assert store.counts().misses == {"size": 1}


def test_a_closed_store_has_nothing(make: Any) -> None:
    store = make()
    store.put(NAMES[0], page_of(NAMES[0]))
    store.close()
    store.close()
    assert read_right(store, NAMES) == 0
    assert not store.put(NAMES[1], page_of(NAMES[1]))
    store.refresh()
    assert (store.counts().misses, store.counts().refused) == ({"closed": 1}, {"closed": 1})


@pytest.mark.parametrize("count", [1, 1023, 1024, 1025, 2500])
def test_views_of_many_small_pieces(make: Any, count: int) -> None:
    store, data = make(), data_of(NAMES[0], 5000)
    cuts = sorted(random.Random(count).choices(range(5000), k=count - 1))  # some are empty
    assert store.put(NAMES[0], pieces(data, cuts))
    into = pieces(bytes(5000), [*range(1, 5000, 2)])
    assert store.read(NAMES[:1], [into]) == 1
    assert b"".join(into) == data


@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_least_recently_used_pages_go_first(kind: str, tmp_path: Path) -> None:
    size = PAGE + (HEADER if kind == "directory" else 0)
    store = MemoryStore(4 * size) if kind == "memory" else DirectoryStore(tmp_path / "pages", 4 * size)
    for name in NAMES[:4]:
        assert store.put(name, page_of(name))
    assert read_right(store, NAMES[:1]) == 1
    assert store.put(NAMES[1], page_of(NAMES[1]))
    assert store.put(NAMES[4], page_of(NAMES[4]))
    assert store.put(NAMES[5], page_of(NAMES[5]))
    assert [at for at, name in enumerate(NAMES) if store.has(name)] == [0, 1, 4, 5]
    counts = store.counts()
    assert (counts.evicted, counts.bytes) == (2, 4 * size)
    assert not store.put(NAMES[6], pieces(bytes(4 * size + 1)))
    assert store.counts().refused == {"too large": 1}
    assert store.counts().records == 4


def test_threads_read_and_write_the_same_pages(make: Any) -> None:
    store, faults = make(16 * PAGE), list[BaseException]()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        try:
            for _ in range(60):
                name = draw.choice(NAMES)
                if draw.random() < 0.5:
                    store.put(name, page_of(name), state_of(name))
                else:
                    read_right(store, [name], states=True)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert store.counts().misses.keys() <= {"absent", "vanished"}
    assert store.counts().refused == {}


def test_an_archive_is_read_as_it_was_written(tmp_path: Path) -> None:
    header = {"ids": [1, 2, 3], "text": "\ud800 ü", "deep": {"er": [None, True, 0.5]}}
    writer = ArchiveWriter(tmp_path / "a", header)
    for name in NAMES:
        assert writer.put(name, page_of(name), state_of(name))
    assert not (tmp_path / "a").exists()
    assert writer.finish() == len(NAMES)
    assert not writer.put(name_of(99), page_of(name_of(99)))
    archive = Archive(tmp_path / "a")
    assert archive.header == header
    assert archive.leading([*NAMES, name_of(99)], states=True) == len(NAMES)
    assert read_right(archive, NAMES, states=True) == len(NAMES)
    assert not archive.put(NAMES[0], page_of(NAMES[0]))
    assert archive.counts().refused == {"read only": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    archive.close()
    assert read_right(archive, NAMES) == 0
