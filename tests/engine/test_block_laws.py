"""The laws of the design, over random request lifetimes on a diffusion model that is scripted."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.engine.block_worlds import COMBINATIONS, make_block_world
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
