"""The scheduler's state machine with a model that has recurrent state, and the bugs it finds in snapshots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from aioinfer.cache.fenced import FencedPool
from aioinfer.cache.radix import RadixTree, Snapshot
from aioinfer.cache.snapshots import SnapshotPool, SnapshotTree
from aioinfer.scheduling.sequence import Sequence
from aioinfer.scheduling.states import StateCells
from tests.planted_bugs import assert_found
from tests.scheduling.machine import SchedulerMachine
from tests.tiers import PLANTED_BUG, SECONDS, grid, nightly, rest, scaled

LAWFUL = settings(
    max_examples=scaled(120, 24), stateful_step_count=40, deadline=None, derandomize=True, database=None
)


class Stateful(SchedulerMachine):
    """Many chunks and pages, so that there is much to take snapshots of, and few snapshots."""

    fixed: ClassVar[dict[str, Any]] = {"prefix_cache": True, "snapshots": 3, "page_size": 1}


@rest(SECONDS)
@pytest.mark.parametrize("snapshots", grid([1, 3], [0, 2, 16]))
def test_the_scheduler_keeps_the_laws(snapshots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Stateful.fixed, "snapshots", snapshots)
    run_state_machine_as_test(Stateful, settings=LAWFUL)  # type: ignore[no-untyped-call]


# -- planted bugs --------------------------------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}


def mutant(patch: Patch) -> Patch:
    MUTANTS[patch.__name__] = patch
    return patch


@mutant
def any_cached_page_will_do(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotTree, "find", RadixTree.find)
    patch.setattr(SnapshotTree, "lock", RadixTree.lock)


@mutant
def snapshots_without_fence(patch: pytest.MonkeyPatch) -> None:
    give = FencedPool.give
    patch.setattr(SnapshotPool, "give", lambda self, items, fence: give(self, items, 0), raising=False)


@mutant
def a_snapshot_that_is_wanted_is_given_up(patch: pytest.MonkeyPatch) -> None:
    def oldest(self: SnapshotPool) -> Snapshot | None:
        return next((each for each in self._used if each.fence <= self.last_resolved), None)

    patch.setattr(SnapshotPool, "oldest", oldest)


@mutant
def a_snapshot_in_flight_is_given_up(patch: pytest.MonkeyPatch) -> None:
    uncache = SnapshotPool.uncache

    def at_once(self: SnapshotPool, snapshot: Snapshot) -> None:
        snapshot.fence = 0
        uncache(self, snapshot)

    def oldest(self: SnapshotPool) -> Snapshot | None:
        return next((each for each in self._used if not each.readers), None)

    patch.setattr(SnapshotPool, "oldest", oldest)
    patch.setattr(SnapshotPool, "uncache", at_once)


@mutant
def the_upper_half_of_a_split_takes_the_snapshot(patch: pytest.MonkeyPatch) -> None:
    split = RadixTree._split

    def taking(self: RadixTree, node: Any, at: int) -> Any:
        upper = split(self, node, at)
        if node.snapshot is not None:
            upper.snapshot, node.snapshot = node.snapshot, None
            upper.snapshot.node = upper
        return upper

    patch.setattr(RadixTree, "_split", taking)


@mutant
def a_run_that_is_cut_keeps_its_snapshot(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotTree, "_lose_end", lambda self, node: None)


@mutant
def shared_before_it_resolved(patch: pytest.MonkeyPatch) -> None:
    cells = StateCells.cells

    def early(
        self: StateCells, request: Sequence, start: int, stop: int, step_id: int, *, last: bool
    ) -> tuple[int, int]:
        found = cells(self, request, start, stop, step_id, last=last)
        states, lock = request.kv.states, request.kv.lock
        if states is not None and states.taken and lock is not None and self.tree is not None:
            states.taken[-1].position = lock.num_pages * self._page_size
            if self.tree.attach(states.taken[-1], lock):
                states.taken.pop()
        return found

    patch.setattr(StateCells, "cells", early)


@mutant
def the_slower_of_two_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def settle(self: StateCells, request: Sequence) -> None:
        states, lock = request.kv.states, request.kv.lock
        while states is not None and states.taken and states.taken[0].position <= request.cursor.committed:
            assert self.tree is not None
            assert lock is not None
            self.tree.attach(states.taken.pop(0), lock)

    patch.setattr(StateCells, "settle", settle)


@mutant
def what_is_private_is_lost_with_its_request(patch: pytest.MonkeyPatch) -> None:
    def release(self: StateCells, request: Sequence) -> None:
        self._leave_source(request)
        request.kv.states = None

    patch.setattr(StateCells, "release", release)


@mutant
def the_row_behind_a_snapshot_reads_the_slot(patch: pytest.MonkeyPatch) -> None:
    cells = StateCells.cells

    def forgetful(
        self: StateCells, request: Sequence, start: int, stop: int, step_id: int, *, last: bool
    ) -> tuple[int, int]:
        read, write = cells(self, request, start, stop, step_id, last=last)
        return min(read, request.kv.slot), write

    patch.setattr(StateCells, "cells", forgetful)


@nightly(PLANTED_BUG)
@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[name](monkeypatch)
    assert_found(Stateful)
