"""The exchange of pages: directories that only one dispatcher has, and orders about pages on the wire."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from aioinfer import SamplingParams
from aioinfer.errors import ConfigError
from aioinfer.parallel.exchange import Exchange
from aioinfer.parallel.messages import (
    PIECE,
    Fetch,
    Fetched,
    Hello,
    Keep,
    Kept,
    Share,
    Shared,
    Store,
    Stored,
    Submit,
    Welcome,
)
from aioinfer.parallel.replica import ReplicaState
from aioinfer.request import Request
from aioinfer.tiers.store import Views
from tests.parallel.served import TOKEN, Peer, Served, dispatching, toy
from tests.parallel.test_forks import child_of_a_fork
from tests.parallel.waiting import until
from tests.tiers import SECONDS, rest

GIB = 0.001


def left(parent: Path) -> list[str]:
    return sorted(each.name for each in parent.iterdir())


# -- directories ---------------------------------------------------------------------------------------


def test_a_directory_is_private_and_gone_with_its_exchange(tmp_path: Path) -> None:
    exchange = Exchange(GIB, "directory")
    exchange.open([tmp_path])
    path = exchange.path
    assert path is not None
    assert path.stat().st_mode & 0o777 == 0o700
    assert left(tmp_path) == [path.name, f"{path.name}.lock"]
    store = exchange.store()
    assert store is not None
    page: Views = [memoryview(bytearray(b"page"))]
    assert store.put(bytes(16), page)
    exchange.close()
    exchange.close()
    assert left(tmp_path) == []
    assert not store.put(bytes(16), page)
    assert store.read([bytes(16)], [page]) == 0
    store.close()


def test_two_exchanges_leave_each_other_alone(tmp_path: Path) -> None:
    first, second = Exchange(GIB, "directory"), Exchange(GIB, "directory")
    first.open([tmp_path])
    second.open([tmp_path])
    assert first.path is not None
    assert first.path.is_dir()
    assert len(left(tmp_path)) == 4
    first.close()
    assert len(left(tmp_path)) == 2
    second.close()


@rest(SECONDS)
def test_what_a_killed_process_has_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    source = """
        import sys
        from pathlib import Path
        from aioinfer.parallel.exchange import Exchange

        exchange = Exchange(0.001, "directory")
        exchange.open([Path(sys.argv[1])])
        exchange.store().put(bytes(16), [memoryview(bytearray(100))])
        print("there", flush=True)
        sys.stdin.read()
    """
    command = [sys.executable, "-c", textwrap.dedent(source), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"there\n"
        found = left(tmp_path)
        assert len(found) == 2
        exchange = Exchange(GIB, "directory")
        exchange.open([tmp_path])
        assert set(found) < set(left(tmp_path)), "it is not removed while its process lives"
        exchange.close()
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    assert left(tmp_path) == found
    exchange.open([tmp_path])
    assert not set(found) & set(left(tmp_path))
    exchange.close()
    assert left(tmp_path) == []


def test_a_child_of_a_fork_neither_removes_a_directory_nor_keeps_it(tmp_path: Path) -> None:
    exchange, later = Exchange(GIB, "directory"), Exchange(GIB, "directory")
    exchange.open([tmp_path])
    path, lock = exchange.path, exchange._lock
    assert path is not None
    assert lock is not None
    with child_of_a_fork(exchange.close):
        assert path.is_dir()
        lock.close()  # as its end would do
        later.open([tmp_path])
        assert not path.exists()
    later.close()


def test_what_others_have_under_such_a_name_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aioinfer-pages-0.lock").touch()
    (tmp_path / "aioinfer-pages-0").mkdir()
    monkeypatch.setattr(os, "getuid", lambda: 1 << 20)
    exchange = Exchange(GIB, "directory")
    exchange.open([tmp_path])
    exchange.close()
    assert left(tmp_path) == ["aioinfer-pages-0", "aioinfer-pages-0.lock"]


def test_a_link_in_place_of_a_directory_is_not_followed(tmp_path: Path) -> None:
    parent, other = tmp_path / "parent", tmp_path / "other"
    parent.mkdir()
    other.mkdir()
    (other / "file").touch()
    (parent / "aioinfer-pages-0.lock").touch()
    (parent / "aioinfer-pages-0").symlink_to(other)
    exchange = Exchange(GIB, "directory")
    exchange.open([parent])
    exchange.close()
    assert left(other) == ["file"]


def test_the_first_place_with_room_is_taken(tmp_path: Path) -> None:
    exchange = Exchange(GIB, "directory")
    exchange.open([tmp_path / "missing", tmp_path])
    assert exchange.path is not None
    assert exchange.path.parent == tmp_path
    exchange.close()
    with pytest.raises(ConfigError, match="roles: there is no place for pages"):
        exchange.open([tmp_path / "missing"])


def test_without_a_directory_nothing_is_made(tmp_path: Path) -> None:
    for kind, there in (("memory", True), ("messages", False)):
        exchange = Exchange(GIB, kind)  # type: ignore[arg-type]
        exchange.open([tmp_path])
        assert exchange.path is None
        assert (exchange.store() is not None) is there
        assert exchange.store() is exchange.store(), "engines of one process have one store"
        exchange.close()
        assert exchange.store() is None
    assert left(tmp_path) == []


# -- orders --------------------------------------------------------------------------------------------


async def answer(peer: Peer, kind: type) -> Any:
    while not isinstance(found := await peer.next(), kind):
        assert found is not None, "the connection has ended"
    return found


async def greeted(served: Served, *, pages: int = 0, directory: bytes | None = None) -> Peer:
    peer = await Peer.connect(served.path)
    peer.send(Hello(TOKEN))
    assert isinstance(await peer.next(), Welcome)
    if pages:
        peer.send(Share(3, pages, directory))
        assert await answer(peer, Shared) == Shared(3)
    return peer


IDS = list(range(1, 37))


async def stored(peer: Peer) -> Stored:
    """A prompt of nine pages is computed and stored."""
    request = Request(params=SamplingParams(max_tokens=1, ignore_eos=True, temperature=0, seed=1))
    peer.send(Submit.of(1, IDS, request, None, 0))
    while True:
        rows = await peer.next()
        assert rows is not None
        if any(row.ending for _, row in getattr(rows, "rows", ())):
            break
    peer.send(Store(7, IDS))
    found: Stored = await answer(peer, Stored)
    return found


@rest(SECONDS)
async def test_a_page_goes_from_one_replica_to_another_in_messages(served: Served) -> None:
    peer = await greeted(served, pages=1 << 20)
    found = await stored(peer)
    assert (found.number, found.tokens, len(found.names)) == (7, 36, 9)
    peer.send(Fetch(8, found.names[2], 0))
    page = await answer(peer, Fetched)
    size = served.engine.info.page_bytes
    assert (page.number, page.total, len(page.data)) == (8, size, size)
    peer.send(Fetch(9, found.names[2], size - 3))
    assert (await answer(peer, Fetched)).data == page.data[-3:]
    peer.send(Fetch(10, b"x" * 16, 0))
    assert (await answer(peer, Fetched)) == Fetched(10)
    for number, (name, at, total, data, kept) in enumerate(
        [
            (b"n" * 16, 0, size, page.data[:5], True),
            (b"n" * 16, 5, size, page.data[5:], True),
            (b"m" * 16, 0, size, page.data[:5], True),
            (b"m" * 16, 6, size, page.data[6:], False),  # a gap
            (b"o" * 16, 5, size, page.data[5:], False),  # no beginning
            (b"m" * 16, 5, size, page.data[5:] + b"x", False),
            (b"m" * 16, 0, size + 1, page.data + b"x", False),  # no page of this model
            (b"m" * 16, 0, size, page.data, True),
        ],
        20,
    ):
        peer.send(Keep(number, name, at, total, data))
        assert (await answer(peer, Kept)) == Kept(number, kept), number
    peer.send(Fetch(11, b"n" * 16, 0))
    assert (await answer(peer, Fetched)).data == page.data
    await peer.close()
    # They are gone with the connection.
    await until(lambda: served.agent.session is None)
    peer = await greeted(served, pages=1 << 20)
    peer.send(Fetch(12, b"n" * 16, 0))
    assert (await answer(peer, Fetched)) == Fetched(12)
    await peer.close()


@rest(SECONDS)
async def test_replicas_of_one_machine_leave_pages_in_files(served: Served, tmp_path: Path) -> None:
    peer = await greeted(served, pages=1 << 20, directory=os.fsencode(tmp_path / "pages"))
    found = await stored(peer)
    assert (found.tokens, len(found.names)) == (36, 9)
    assert len([*(tmp_path / "pages").glob("*/*.p")]) == 9
    await peer.close()


@rest(SECONDS)
@pytest.mark.parametrize(
    "order",
    [Store(1, IDS), Fetch(1, bytes(16), 0), Keep(1, bytes(16), 0, 64, bytes(64))],
    ids=["store", "fetch", "keep"],
)
async def test_orders_about_pages_end_a_connection_that_wanted_none(served: Served, order: Any) -> None:
    peer = await greeted(served)
    peer.send(order)
    while await peer.next() is not None:
        pass
    await peer.close()


@rest(SECONDS)
@pytest.mark.parametrize(
    "order",
    [Fetch(1, bytes(15), 0), Fetch(1, bytes(16), -1), Keep(1, bytes(16), 0, 64, bytes(PIECE + 1))],
    ids=["name", "at", "piece"],
)
async def test_malformed_orders_about_pages_end_a_connection(served: Served, order: Any) -> None:
    peer = await greeted(served, pages=1 << 20)
    peer.send(order)
    while await peer.next() is not None:
        pass
    await peer.close()


@rest(SECONDS)
async def test_a_directory_that_cannot_be_shared_is_refused(served: Served, tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open" / "file").touch()
    peer = await greeted(served)
    for directory, why in ((tmp_path / "open", "is open to others"), (tmp_path / "open" / "file", "")):
        peer.send(Share(1, 1 << 20, os.fsencode(directory)))
        refused = await answer(peer, Shared)
        assert refused.why
        assert why in refused.why
    peer.send(Share(2, 1 << 20, os.fsencode(tmp_path / "own")))
    assert await answer(peer, Shared) == Shared(2)
    await peer.close()


@rest(SECONDS)
async def test_a_dispatcher_closes_what_it_has_opened(tmp_path: Path) -> None:
    roles = ["prefill", "decode"]
    async with dispatching(tmp_path, toy(), toy(), roles=roles, prefill_tokens=4) as dispatcher:
        exchange = dispatcher._exchange
        assert exchange is not None
        assert len((await dispatcher.generate(IDS)).token_ids) > 0
        assert all(replica.state is ReplicaState.READY for replica in dispatcher.replicas)
        assert dispatcher.stats().handovers == 1
    assert dispatcher._exchange is None
