"""What a server keeps for its keys: bounded by number, bytes and time, and found by its owner only."""

from __future__ import annotations

from aioinfer.ledger import Ledger, Share
from aioinfer.server.owned import Owned


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def share(bound: int) -> Share:
    return Share("kept", bound=bound, ledger=Ledger())


async def test_an_id_is_found_by_its_owner_only() -> None:
    owned: Owned[str] = Owned(2)
    owned.add("alice", "1", "a", ttl=9)
    owned.add("bob", "1", "b", ttl=9)
    assert (owned.find("alice", "1"), owned.find("bob", "1"), owned.find("carol", "1")) == ("a", "b", None)
    assert not owned.remove("carol", "1")
    assert owned.remove("alice", "1")
    assert (owned.of("alice"), owned.of("bob")) == ([], ["b"])
    owned.clear()


async def test_beyond_its_number_an_owner_loses_what_it_used_longest_ago() -> None:
    gone: list[str] = []
    owned: Owned[str] = Owned(2, forget=gone.append)
    owned.add("bob", "b", "b", ttl=9)
    for name in ("1", "2"):
        owned.add("alice", name, name, ttl=9)
    owned.use("alice", "1")
    owned.add("alice", "3", "3", ttl=9)
    assert (owned.of("alice"), owned.of("bob"), gone) == (["1", "3"], ["b"], ["2"])
    owned.clear()
    assert sorted(gone) == ["1", "2", "3", "b"]


async def test_beyond_their_bytes_the_owner_of_most_loses() -> None:
    room = share(100)
    owned: Owned[str] = Owned(9, share=room)
    for name in ("1", "2", "3"):
        assert owned.add("alice", name, name, ttl=9, size=30)
    assert owned.add("bob", "b", "b", ttl=9, size=40)
    assert (owned.of("alice"), owned.of("bob"), room.promised) == (["2", "3"], ["b"], 100)
    owned.clear()


async def test_what_has_no_room_takes_nothing_from_others() -> None:
    room = share(100)
    owned: Owned[str] = Owned(9, share=room)
    owned.add("alice", "a", "a", ttl=9, size=60)
    assert room.take(20)  # by somebody else
    for size in (81, 101):
        assert not owned.add("bob", "b", "too large", ttl=9, size=size)
    assert (owned.of("alice"), owned.of("bob"), room.promised) == (["a"], [], 80)
    assert owned.add("bob", "b", "b", ttl=9, size=80)
    assert (owned.of("alice"), room.promised) == ([], 100)
    owned.clear()
    assert room.promised == 20


async def test_what_is_not_used_for_its_time_expires() -> None:
    clock, gone = Clock(), list[str]()
    owned: Owned[str] = Owned(9, forget=gone.append, clock=clock)
    owned.add("alice", "long", "long", ttl=20)
    owned.add("alice", "short", "short", ttl=10)
    clock.now = 9
    assert owned.left("alice", "short") == 1
    owned.use("alice", "short")
    clock.now = 18.5
    assert owned.find("alice", "short") == "short"
    clock.now = 19
    assert owned.find("alice", "short") is None
    assert not owned.remove("alice", "short")
    clock.now = 20
    assert owned.of("alice") == []
    assert sorted(gone) == ["long", "short"]
    owned.clear()


async def test_what_is_in_use_does_not_expire() -> None:
    clock, used = Clock(), {"a"}
    owned: Owned[str] = Owned(9, in_use=used.__contains__, clock=clock)
    owned.add("alice", "1", "a", ttl=10)
    owned.add("alice", "2", "b", ttl=10)
    clock.now = 15
    assert owned.of("alice") == ["a"]
    owned.use("alice", "1")
    used.clear()
    clock.now = 24
    assert owned.of("alice") == ["a"]
    clock.now = 25
    assert owned.find("alice", "1") is None
    assert owned.of("alice") == []
    owned.clear()


async def test_what_was_replaced_leaves_nothing_behind() -> None:
    room = share(100)
    owned: Owned[int] = Owned(2, share=room)
    for number in range(1000):
        owned.add("alice", str(number % 3), number, ttl=9, size=7)
    assert owned.of("alice") == [998, 999]
    assert room.promised == 14
    assert len(owned._due) < 100
    owned.clear()
    assert room.promised == 0


async def test_where_nothing_may_be_owned_nothing_is() -> None:
    owned: Owned[int] = Owned(0)
    assert not owned.add("alice", "1", 1, ttl=9)
    assert owned.find("alice", "1") is None
