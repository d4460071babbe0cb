"""What a server keeps for its keys: bounded by number, bytes and time, and found by its owner only."""

from __future__ import annotations

from aioinfer.ledger import Ledger, Share
from aioinfer.server.kept import Kept


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def share(bound: int) -> Share:
    return Share("kept", bound=bound, ledger=Ledger())


async def test_an_id_is_found_by_its_owner_only() -> None:
    kept: Kept[str] = Kept(2)
    kept.add("alice", "1", "a", ttl=9)
    kept.add("bob", "1", "b", ttl=9)
    assert (kept.find("alice", "1"), kept.find("bob", "1"), kept.find("carol", "1")) == ("a", "b", None)
    assert not kept.remove("carol", "1")
    assert kept.remove("alice", "1")
    assert (kept.of("alice"), kept.of("bob")) == ([], ["b"])
    kept.clear()


async def test_beyond_its_number_an_owner_loses_what_it_used_longest_ago() -> None:
    gone: list[str] = []
    kept: Kept[str] = Kept(2, forget=gone.append)
    kept.add("bob", "b", "b", ttl=9)
    for name in ("1", "2"):
        kept.add("alice", name, name, ttl=9)
    kept.use("alice", "1")
    kept.add("alice", "3", "3", ttl=9)
    assert (kept.of("alice"), kept.of("bob"), gone) == (["1", "3"], ["b"], ["2"])
    kept.clear()
    assert sorted(gone) == ["1", "2", "3", "b"]


async def test_beyond_their_bytes_the_owner_of_most_loses() -> None:
    room = share(100)
    kept: Kept[str] = Kept(9, share=room)
    for name in ("1", "2", "3"):
        assert kept.add("alice", name, name, ttl=9, size=30)
    assert kept.add("bob", "b", "b", ttl=9, size=40)
    assert (kept.of("alice"), kept.of("bob"), room.promised) == (["2", "3"], ["b"], 100)
    assert not kept.add("bob", "b", "too large", ttl=9, size=101)
    assert (len(kept), room.promised) == (0, 0)
    kept.clear()


async def test_what_is_not_used_for_its_time_expires() -> None:
    clock, gone = Clock(), list[str]()
    kept: Kept[str] = Kept(9, forget=gone.append, clock=clock)
    kept.add("alice", "long", "long", ttl=20)
    kept.add("alice", "short", "short", ttl=10)
    clock.now = 9
    assert kept.left("alice", "short") == 1
    kept.use("alice", "short")
    clock.now = 18.5
    assert kept.find("alice", "short") == "short"
    clock.now = 19
    assert kept.find("alice", "short") is None
    assert not kept.remove("alice", "short")
    clock.now = 20
    assert kept.of("alice") == []
    assert sorted(gone) == ["long", "short"]
    kept.clear()


async def test_what_was_replaced_leaves_nothing_behind() -> None:
    room = share(100)
    kept: Kept[int] = Kept(2, share=room)
    for number in range(1000):
        kept.add("alice", str(number % 3), number, ttl=9, size=7)
    assert kept.of("alice") == [998, 999]
    assert room.promised == 14
    assert len(kept._due) < 100
    kept.clear()
    assert room.promised == 0


async def test_where_nothing_may_be_kept_nothing_is() -> None:
    kept: Kept[int] = Kept(0)
    assert not kept.add("alice", "1", 1, ttl=9)
    assert kept.find("alice", "1") is None
