"""Snapshots in the prefix tree: where they are carried, what is found, and when they are given up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from aioinfer.cache.nodes import Snapshot
from aioinfer.cache.radix import Lock, token_key
from aioinfer.cache.snapshots import SnapshotPool, SnapshotTree

PAGE = 2
#: eight pages
LONG = list(range(16))


def make(snapshots: int = 4) -> SnapshotTree:
    return SnapshotTree(PAGE, SnapshotPool(snapshots))


def keep(tree: SnapshotTree, ids: Sequence[int], lock: Lock | None = None, fence: int = 0) -> Snapshot | None:
    """Add a prefix, on pages from 100 on, and a snapshot behind it; None if the tree did not want it."""
    lock = tree.lock(b"") if lock is None else lock
    tree.extend(lock, token_key(ids), [100 + at for at in range(len(ids) // PAGE)])
    snapshot = Snapshot(tree.pool.take(1)[0], len(ids))
    snapshot.fence = fence
    kept = tree.attach(snapshot, lock)
    tree.unlock(lock, fence)
    if not kept:
        tree.pool.give((snapshot.item,), fence)
    return snapshot if kept else None


def found(tree: SnapshotTree, ids: Sequence[int]) -> int:
    """Pages that can be used."""
    key = token_key(ids)
    pages, node = tree.find(key)
    lock = tree.lock(key)
    assert lock.num_pages == pages == len(lock.pages())
    assert node is None or node is lock.node
    tree.unlock(lock, 0)
    audit(tree)
    return pages


def audit(tree: SnapshotTree, locks: Sequence[Lock] = ()) -> None:
    tree.check()
    tree.pool.check()
    tree.audit(locks)
    tree.pool.audit((), [snapshot.item for snapshot in tree.pool.cached_snapshots()])


def test_what_is_found_ends_at_the_deepest_snapshot() -> None:
    tree = make()
    keep(tree, LONG[:4])
    keep(tree, LONG[:10])
    assert found(tree, LONG[:3]) == 0
    assert found(tree, LONG[:4]) == 2
    assert found(tree, LONG[:9]) == 2, "the second is not reached"
    assert found(tree, LONG) == 5
    assert found(tree, [*LONG[:5], 99, 99]) == 2
    assert tree.match(token_key(LONG[:9])) == 4


def test_pages_without_any_snapshot_are_not_found() -> None:
    tree = make()
    lock = tree.lock(b"")
    tree.extend(lock, token_key(LONG), list(range(1, 9)))
    tree.unlock(lock, 0)
    assert found(tree, LONG) == 0
    assert tree.match(token_key(LONG)) == 8


def test_a_node_that_is_split_carries_its_snapshot_at_its_end() -> None:
    tree = make()
    keep(tree, LONG)
    keep(tree, [*LONG[:6], 90, 91])
    assert tree.num_nodes == 3
    assert found(tree, LONG) == 8
    assert found(tree, LONG[:6]) == 0, "where it was split is no state"
    assert found(tree, [*LONG[:6], 90, 91, 92]) == 4


def test_a_node_carries_one_and_the_faster_one_stays() -> None:
    tree = make()
    first = keep(tree, LONG[:4])
    assert keep(tree, LONG[:4]) is None
    assert tree.pool.cached_snapshots() == [first]
    audit(tree)


def test_a_snapshot_inside_of_a_run_is_refused() -> None:
    tree = make()
    lock = tree.lock(b"")
    tree.extend(lock, token_key(LONG[:8]), [1, 2, 3, 4])
    assert not tree.attach(Snapshot(1, 6), lock)
    assert not tree.attach(Snapshot(1, 0), tree.lock(b"", "other")), "a root stands for no token"


@pytest.mark.parametrize("evicted", [1, 3, 8])
def test_a_run_that_is_cut_loses_its_snapshot(evicted: int) -> None:
    tree = make()
    keep(tree, LONG)
    tree.evict(evicted, 0)
    assert tree.match(token_key(LONG)) == 8 - evicted
    assert found(tree, LONG) == 0
    assert tree.pool.free == 4


def test_the_snapshot_above_survives_what_is_evicted_below() -> None:
    tree = make()
    keep(tree, LONG[:4])
    keep(tree, LONG)
    tree.evict(2, 0)
    assert found(tree, LONG) == 2
    assert tree.pool.cached == 1


def test_a_snapshot_behind_a_fence_is_free_when_its_step_has_resolved() -> None:
    tree = make(1)
    keep(tree, LONG[:4], fence=3)
    assert tree.flush() == [([100, 101], 3)]
    assert (tree.pool.free, tree.pool.fenced) == (0, 1)
    tree.pool.resolved(2)
    assert not tree.make_room()
    tree.pool.resolved(3)
    assert tree.make_room()


def test_the_least_recently_used_one_is_given_up() -> None:
    tree = make(2)
    first, second = keep(tree, LONG[:4]), keep(tree, LONG[:8])
    assert first is not None
    tree.pool.used(first)
    version = tree.version
    assert tree.make_room()
    assert tree.version > version, "what was looked up before is no longer true"
    assert tree.pool.cached_snapshots() == [first]
    assert second is not None
    assert second.node is None
    assert found(tree, LONG) == 2
    assert tree.match(token_key(LONG)) == 4, "its pages stay"


def test_one_that_is_wanted_or_in_flight_is_not_given_up() -> None:
    tree = make(2)
    first, second = keep(tree, LONG[:4]), keep(tree, LONG[:8], fence=5)
    assert first is not None
    first.readers = 1
    assert not tree.make_room()
    tree.pool.resolved(5)
    assert tree.make_room()
    assert tree.pool.cached_snapshots() == [first]
    assert second is not None


def test_what_is_flushed_while_it_is_locked_gives_its_snapshot_back_with_its_lock() -> None:
    tree = make()
    keep(tree, LONG[:4])
    lock = tree.lock(token_key(LONG))
    assert tree.flush() == []
    assert tree.find(token_key(LONG)) == (0, None)
    audit(tree, [lock])
    assert tree.deepest(lock) == (2, lock.node), "its holder may still go back there"
    assert tree.unlock(lock, 0) == [([100, 101], 0)]
    assert tree.pool.free == 4
    audit(tree)


def test_a_prefix_that_is_forgotten_by_its_tokens_includes_what_lies_behind_the_snapshot() -> None:
    tree = make()
    keep(tree, LONG[:4])
    lock = tree.lock(token_key(LONG))
    tree.extend(lock, token_key(LONG[4:]), list(range(1, 7)))
    tree.unlock(lock, 0)
    keep(tree, [*LONG[:2], 70, 71])
    gone = tree.forget_key(token_key(LONG))
    assert sum(len(run) for run, _ in gone) == 7
    assert tree.match(token_key(LONG)) == 1, "what another prefix needs stays"
    assert found(tree, [*LONG[:2], 70, 71]) == 2
    assert tree.pool.cached == 1


def test_a_lock_is_shortened_to_a_snapshot_before_its_end() -> None:
    tree = make()
    keep(tree, LONG[:4])
    lock = tree.lock(token_key(LONG))
    tree.extend(lock, token_key(LONG[4:]), list(range(1, 7)))
    assert tree.evictable == 0
    assert tree.deepest(lock) == tree.deepest(lock, 7)
    pages, top = tree.deepest(lock)
    assert tree.shorten(lock, pages, top, 3) == []
    assert lock.pages() == [100, 101]
    assert tree.evictable == 6
    audit(tree, [lock])
    assert tree.evict(8, 2) == [], "a step in flight still reads them"
    assert len(tree.evict(8, 3)) == 6
    assert tree.deepest(lock, 1) == (0, lock.node.parent)
    tree.unlock(lock, 3)
    audit(tree)


def test_namespaces_do_not_share_states() -> None:
    tree = make()
    keep(tree, LONG[:4], tree.lock(b"", "a"))
    assert tree.find(token_key(LONG), "a")[0] == 2
    assert tree.find(token_key(LONG), "b") == (0, None)
    assert found(tree, LONG) == 0
