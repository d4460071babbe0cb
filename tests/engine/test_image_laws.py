"""The laws of the design, over random lifetimes of requests whose prompts have images."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine.simulation import simulate
from tests.engine.worlds import make_seeing_world
from tests.tiers import SECONDS, SIMULATION, grid, rest, scaled

LIFETIMES = scaled(80)
WORLDS = 32


@rest(SECONDS)
@pytest.mark.parametrize("block", grid([0], range(1, 4), SIMULATION))
def test_random_lifetimes_with_images_keep_every_law(block: int) -> None:
    counts: Counter[str] = Counter()
    encoded = restored = 0
    for seed in range(block * WORLDS, (block + 1) * WORLDS):
        world, _ = simulate(seed, LIFETIMES, make=make_seeing_world)
        counts += world.counts
        restored += world.restored
        encoded += sum(world.device.features.encoded.values())
    assert counts.total() == LIFETIMES * WORLDS
    assert encoded > counts.total() // 8
    assert restored
    for outcome in ("finished", "cancelled", "step failed"):
        assert counts[outcome] > 0, (outcome, counts)


@rest(SECONDS)
def test_without_faults_requests_with_images_end_well() -> None:
    world, _ = simulate(78, 200, fault_rate=0.0, make=make_seeing_world)
    assert world.counts["step failed"] == world.counts["out of memory"] == 0
    assert world.counts["finished"] > 0
