"""The laws of a dispatcher, over random lifetimes of its streams, while replicas are lost and come back."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.parallel.simulation import simulate
from tests.tiers import SECONDS, SIMULATION, grid, rest, scaled

LIFETIMES = scaled(60)
BLOCKS = 6
#: per block; every policy comes up five times in each
WORLDS = 34


@rest(SECONDS)
@pytest.mark.parametrize("block", grid([0], range(1, BLOCKS), SIMULATION))
def test_random_lifetimes_keep_every_law(block: int) -> None:
    """6 blocks of 34 worlds of 60 lifetimes: 12,240 in all. The rest has 272."""
    counts: Counter[str] = Counter()
    for seed in range(block * WORLDS, (block + 1) * WORLDS):
        counts += simulate(seed, LIFETIMES).counts
    # The worlds are worth something only if all this did occur.
    for happening in (
        "finished", "left", "cancelled", "dropped", "never read", "timed out", "replicas lost", "restarts",
        "replicas rolled", "replicas that hang", "moved", "streams lost", "worlds with frames",
        "worlds with roles", "handed over", "handed over with pages", "sessions moved",
    ):  # fmt: skip
        assert counts[happening] > 0, (happening, counts)


@rest(SECONDS)
@pytest.mark.parametrize("seed", [3])
def test_the_same_seed_takes_the_same_course(seed: int) -> None:
    first, second, other = simulate(seed, 30), simulate(seed, 30), simulate(seed + 1, 30)
    assert first.outcomes == second.outcomes != other.outcomes
