"""The laws of the design, over random request lifetimes on a diffusion model that is scripted."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from aioinfer.diffusion.block import Block
from aioinfer.diffusion.paths import BlockRow, Search, Walk
from aioinfer.execution.decoding.block_steering import BlockSteering, RowsGuide
from tests.engine.block_worlds import COMBINATIONS, make_block_world
from tests.engine.guided_blocks import make_constrained_world
from tests.engine.simulation import simulate
from tests.tiers import SECONDS, grid, rest, scaled

LIFETIMES = 24
#: every combination of mode, fused commit, mixing, multi_step and cache, once, or a share of them
WORLDS = random.Random(0).sample(range(len(COMBINATIONS)), scaled(len(COMBINATIONS), 24))


@rest(SECONDS)
def test_random_lifetimes_of_blocks_keep_every_law() -> None:
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in WORLDS:
        world, checker = simulate(seed, LIFETIMES, make=make_block_world)
        counts += world.counts
        totals += checker.totals()
    assert counts.total() == LIFETIMES * len(WORLDS)
    for outcome in (
        *("finished", "left", "cancelled", "dropped", "never read"),
        *("timed out", "step failed", "out of memory"),
    ):
        assert counts[outcome] > 0, (outcome, counts)
    for happening in checker.totals():
        assert totals[happening] > 0, (happening, totals)


@rest(SECONDS)
def test_the_same_seed_takes_the_same_course() -> None:
    first, _ = simulate(3, LIFETIMES, make=make_block_world)
    second, _ = simulate(3, LIFETIMES, make=make_block_world)
    assert first.outcomes == second.outcomes
    assert first.device.steps == second.device.steps > 0


@rest(SECONDS)
@pytest.mark.parametrize("seed", grid([1000], range(1001, 1004)))
def test_a_lost_device_reaches_every_stream(seed: int) -> None:
    world, _ = simulate(seed, LIFETIMES, lose_at=20, make=make_block_world)
    assert world.device.lost
    assert world.counts["engine failed"] > 0
    assert world.counts.total() == LIFETIMES


# -- with constraints ----------------------------------------------------------------------------------


@rest(SECONDS)
def test_random_lifetimes_of_constrained_blocks_keep_every_law() -> None:
    """Every answer is that of its algorithm and its grammar alone, and one that the grammar accepts."""
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    for seed in WORLDS:
        world, checker = simulate(5000 + seed, LIFETIMES, make=make_constrained_world)
        counts += world.counts
        totals += checker.totals()
    for outcome in ("finished", "failed", "left", "cancelled", "dropped"):
        assert counts[outcome] > 0, (outcome, counts)
    for happening in ("retractions", "ended_in_mid_block"):
        assert totals[happening] > 0, (happening, totals)


def _keeps_the_path_of_another_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    _before_steering(monkeypatch, lambda block: block.path.copy_(block.path.roll(1, 0)))


def _before_steering(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Block], Any]) -> None:
    steer = RowsGuide.steer

    def spoilt(self: RowsGuide, logits: Any, asked: Any, proposal: Any, block: Block) -> Any:
        spoil(block)
        return steer(self, logits, asked, proposal, block)

    monkeypatch.setattr(RowsGuide, "steer", spoilt)


def _ignores_known_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    search = Walk.search

    def blind(self: Walk, row: BlockRow) -> Search:
        return search(self, replace(row, known=[False] * len(row.known)))

    monkeypatch.setattr(Walk, "search", blind)


def _keeps_the_rows_of_a_tenancy(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = BlockSteering.admit

    def lazy(self: BlockSteering, slot: int, data: Any) -> None:
        if slot not in self._rows:
            admit(self, slot, data)

    monkeypatch.setattr(BlockSteering, "admit", lazy)


def _keeps_the_output_of_a_tenancy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes back begins its grammar anew."""
    init = Walk.__init__
    monkeypatch.setattr(Walk, "__init__", lambda self, state, output, *rest: init(self, state, (), *rest))


def _mixes_rows_up(monkeypatch: pytest.MonkeyPatch) -> None:
    guide = BlockSteering.guide

    def mixed(self: BlockSteering, slots: Sequence[int], **rest: Any) -> RowsGuide:
        return guide(self, [*slots[1:], *slots[:1]], **rest)

    monkeypatch.setattr(BlockSteering, "guide", mixed)


def _lets_them_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block does not end with its output."""
    written = RowsGuide.written

    def endless(self: RowsGuide, block: Block) -> None:
        done = block.done.clone()
        written(self, block)
        block.done.copy_(done)

    monkeypatch.setattr(RowsGuide, "written", endless)


def _forgets_what_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars stay where a request has taken its slot."""
    monkeypatch.setattr(RowsGuide, "written", lambda self, block: None)


@rest(SECONDS)
@pytest.mark.parametrize(
    ("plant", "first"),
    [
        (_keeps_the_path_of_another_slot, 5202),
        (_ignores_known_tokens, 5001),
        (_keeps_the_rows_of_a_tenancy, 5001),
        (_keeps_the_output_of_a_tenancy, 5007),
        (_mixes_rows_up, 5001),
        (_lets_them_go_on, 5001),
        (_forgets_what_was_written, 5001),
    ],
)
def test_random_lifetimes_find_bugs_planted_in_constraints(
    plant: Callable[[pytest.MonkeyPatch], None], first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``first``: of the seeds, one that finds it, or shortly before."""
    plant(monkeypatch)
    monkeypatch.setattr("tests.engine.simulation._LONGEST", 100.0)  # what hangs shows sooner
    with pytest.raises(BaseException, match="seed="):
        for seed in range(first, first + 40):
            simulate(seed, LIFETIMES, make=make_constrained_world)
