"""The laws of the design, over many thousands of random request lifetimes on the toy device."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.engine.simulation import simulate
from tests.engine.worlds import COMBINATIONS
from tests.tiers import SECONDS, SIMULATION, grid, rest, scaled

LIFETIMES = scaled(80)
BLOCKS = 2
#: per block; every combination of policy, admission, mixing and cache comes up at least twice in each
WORLDS = 128


@rest(SECONDS)
@pytest.mark.parametrize("block", grid([0], range(1, BLOCKS), SIMULATION))
def test_random_lifetimes_keep_every_law(block: int) -> None:
    """2 blocks of 128 worlds of 80 lifetimes: 20,480 in all. The rest has 1,280."""
    counts: Counter[str] = Counter()
    totals: Counter[str] = Counter()
    adapters: Counter[str] = Counter()
    restored = 0
    for seed in range(block * WORLDS, (block + 1) * WORLDS):
        world, checker = simulate(seed, LIFETIMES)
        counts += world.counts
        totals += checker.totals()
        restored += world.restored
        if world.adapters is not None:
            adapters += world.adapters.counts
    assert restored > LIFETIMES
    assert counts.total() == LIFETIMES * WORLDS
    assert len(COMBINATIONS) * 2 <= WORLDS
    # The worlds are worth something only if every way to end, and every device of the scheduler, did occur.
    for outcome in (
        "finished",
        "left",
        "cancelled",
        "dropped",
        "never read",
        "timed out",
        "step failed",
        "out of memory",
    ):
        assert counts[outcome] > 0, (outcome, counts)
    for happening in checker.totals():
        assert totals[happening] > 0, (happening, totals)
    for happening in ("loaded", "replaced", "unloaded", "refused loads", "cancelled loads", "failed loads"):
        assert adapters[happening] > 0, (happening, adapters)
    assert adapters["drained"] > 0, "no version outlived its name"


@rest(SECONDS)
@pytest.mark.parametrize("seed", grid([3], [4, 5]))
def test_the_same_seed_takes_the_same_course(seed: int) -> None:
    first, _ = simulate(seed, 60)
    second, _ = simulate(seed, 60)
    assert first.outcomes == second.outcomes
    assert first.device.steps == second.device.steps
    other, _ = simulate(seed + 100, 60)
    assert first.outcomes != other.outcomes


@rest(SECONDS)
@pytest.mark.parametrize("seed", grid(range(1000, 1003), range(1003, 1020), SIMULATION))
def test_a_lost_device_reaches_every_stream(seed: int) -> None:
    """No reader is left waiting: the simulated loop raises Deadlock if one is."""
    world, _ = simulate(seed, 60, lose_at=20)
    assert world.device.lost
    assert world.counts["engine failed"] > 0
    assert world.counts.total() == 60


@rest(SECONDS)
def test_without_faults_only_deadlines_and_consumers_end_a_request_early() -> None:
    world, _ = simulate(77, 200, fault_rate=0.0)
    assert world.counts["step failed"] == world.counts["out of memory"] == 0
    assert world.counts["finished"] > 0
