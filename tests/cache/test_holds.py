"""Holds: what is left of them, whatever the tree does; and that the state machine would find mistakes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from aioinfer.cache import radix
from aioinfer.cache.holds import Holds
from aioinfer.cache.nodes import Hold
from aioinfer.cache.radix import RadixTree, token_key
from tests.cache.test_radix import TreeMachine
from tests.cache.test_snapshots import LONG, audit, keep, make
from tests.tiers import SECONDS, rest

PAGE = 2


def tree_of(*prefixes: list[int]) -> RadixTree:
    """A tree with these prefixes, of whole pages, the first used longest ago."""
    tree, page = RadixTree(PAGE), 1
    for ids in prefixes:
        lock = tree.lock(token_key(ids))
        new = len(ids) // PAGE - lock.num_pages
        tree.extend(lock, token_key(ids[lock.num_pages * PAGE :]), [*range(page, page + new)])
        tree.unlock(lock, 0)
        page += new
    return tree


def held(tree: RadixTree, ids: list[int]) -> Hold:
    hold = tree.hold(token_key(ids))
    tree.check()
    tree.audit(())
    return hold


def test_held_pages_go_last_and_from_the_end() -> None:
    tree = tree_of([1, 1, 1, 1], [2, 2, 2, 2], [3, 3])
    hold = held(tree, [1, 1, 1, 1])
    assert tree.evictable == 5
    assert tree.evict(3, 0) == [4, 3, 5], "the others, least recently used first"
    assert (hold.num_pages, tree.holds.pages, tree.holds.lost) == (2, 2, 0)
    assert tree.evict(1, 0) == [2]
    assert (hold.num_pages, tree.holds.lost) == (1, 1)
    assert tree.evict(4, 0) == [1]
    assert (hold.num_pages, hold.node, tree.holds.number, tree.holds.lost) == (0, None, 0, 2)
    tree.release_hold(hold)
    tree.check()


def test_of_held_prefixes_those_used_longest_ago_go_first() -> None:
    tree = tree_of([1, 1], [2, 2], [3, 3])
    one, two = held(tree, [1, 1]), held(tree, [2, 2])
    tree.unlock(tree.lock(token_key([1, 1])), 0)
    assert tree.evict(2, 0) == [3, 2]
    assert (one.num_pages, two.num_pages) == (1, 0)


def test_a_hold_that_is_released_leaves_its_pages_to_their_age() -> None:
    tree = tree_of([1, 1], [2, 2])
    hold = held(tree, [1, 1])
    tree.unlock(tree.lock(token_key([2, 2])), 0)
    tree.release_hold(hold)
    tree.release_hold(hold)
    tree.audit(())
    assert tree.evict(1, 0) == [1]


def test_a_held_page_that_a_step_reads_is_not_had_before_it_has_resolved() -> None:
    tree = tree_of([1, 1])
    hold = held(tree, [1, 1])
    tree.unlock(tree.lock(token_key([1, 1])), 5)
    assert tree.evict(1, 4) == []
    assert hold.num_pages == 1
    assert tree.evict(1, 5) == [1]


def test_a_hold_ends_where_the_match_does() -> None:
    tree = tree_of([1, 1, 2, 2, 3, 3])
    hold = held(tree, [1, 1, 2, 2, 9, 9])
    assert hold.num_pages == 2
    assert tree.evict(1, 0) == [3], "what follows is not held"
    assert held(tree, [7, 7]).num_pages == 0
    assert tree.hold(token_key([1, 1]), "another").num_pages == 0
    assert tree.holds.number == 1


def test_a_prefix_that_was_evicted_and_computed_again_is_not_held() -> None:
    tree = tree_of([1, 1])
    hold = held(tree, [1, 1])
    tree.evict(1, 0)
    lock = tree.lock(b"")
    tree.extend(lock, token_key([1, 1]), [9])
    tree.unlock(lock, 0)
    assert (hold.num_pages, tree.holds.pages) == (0, 0)
    again = held(tree, [1, 1])
    tree.release_hold(hold)
    assert again.num_pages == 1


def test_flushed_and_forgotten_pages_are_held_no_longer() -> None:
    tree = tree_of([1, 1, 2, 2], [1, 1, 3, 3])
    one, two = held(tree, [1, 1, 2, 2]), held(tree, [1, 1, 3, 3])
    assert tree.forget_key(token_key([1, 1, 2, 2])) == [([2], 0)]
    assert (one.num_pages, two.num_pages, tree.holds.lost) == (1, 2, 1)
    tree.audit(())
    reader = tree.lock(token_key([1, 1, 3, 3]))
    tree.flush()
    assert (one.num_pages, two.num_pages, tree.holds.pages, tree.holds.lost) == (0, 0, 0, 3)
    tree.audit([reader])
    tree.release_hold(two)
    assert tree.hold_again(one).num_pages == 0
    tree.unlock(reader, 0)
    tree.check()


def test_many_forks_are_counted_once_and_end_one_by_one() -> None:
    tree = tree_of([1, 1, 2, 2], [5, 5])
    holds = [held(tree, [1, 1, 2, 2])]
    holds += [tree.hold_again(holds[0]) for _ in range(1000)]
    assert (tree.holds.number, tree.holds.pages) == (1001, 2)
    assert len(tree._heap) < 200, "entries of the heap are cleared away"
    assert tree.evict(2, 0) == [3, 2]
    assert {hold.num_pages for hold in holds} == {1}
    assert tree.holds.lost == 1
    for hold in holds:
        assert tree.holds.pages == 1
        tree.release_hold(hold)
    assert tree.holds.pages == 0
    tree.audit(())


# -- recurrent states ------------------------------------------------------------------------------------


def test_a_state_of_a_held_prefix_is_given_up_last() -> None:
    tree = make(snapshots=2)
    first = keep(tree, LONG[:4])
    hold = tree.hold(token_key(LONG))
    second = keep(tree, [7, 7])
    assert (hold.num_pages, tree.pool.oldest()) == (2, second), "though the first was used longest ago"
    assert tree.make_room()
    assert (hold.num_pages, tree.pool.oldest()) == (2, first)
    taken = tree.pool.take(1)
    assert tree.make_room(), "it blocks nobody"
    assert hold.num_pages == 0, "its pages are of no use without it"
    tree.pool.give(taken, 0)
    audit(tree)
    tree.release_hold(hold)
    audit(tree)


def test_of_a_recurrent_model_a_hold_ends_with_the_deepest_state() -> None:
    tree = make()
    keep(tree, LONG[:4])
    lock = tree.lock(token_key(LONG[:4]))
    keep(tree, LONG[4:10], lock)
    hold = tree.hold(token_key(LONG))
    assert hold.num_pages == 2, "the second state is not at the end of its prefix"


# -- planted mistakes ------------------------------------------------------------------------------------


def _nothing(*_: Any) -> None:
    """In place of a method."""


def _split(found: Callable[..., Any]) -> Callable[..., Any]:
    def split(self: RadixTree, node: Any, at: int) -> Any:
        upper = found(self, node, at)
        upper.held = 0
        return upper

    return split


BUGS: dict[str, tuple[Any, str, Any]] = {
    "held pages are evicted as others": (radix, "_HELD", 0),
    "a hold stays at a node that has left": (Holds, "leave", _nothing),
    "a cut is not counted": (Holds, "cut", _nothing),
    "a flush forgets no hold": (Holds, "flush", _nothing),
    "an upper half is not held": (RadixTree, "_split", _split(RadixTree._split)),
    "a released leaf keeps its place": (
        RadixTree,
        "release_hold",
        lambda tree, hold: tree.holds.release(hold),
    ),
}


@rest(SECONDS)
@pytest.mark.parametrize("bug", BUGS)
def test_the_state_machine_finds_a_planted_mistake(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*BUGS[bug])
    lawful = settings(
        max_examples=200,
        stateful_step_count=40,
        deadline=None,
        derandomize=True,
        database=None,
        phases=(Phase.generate,),
    )
    with pytest.raises((AssertionError, AttributeError, ExceptionGroup)):
        run_state_machine_as_test(TreeMachine, settings=lawful)
