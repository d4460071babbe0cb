"""Packing in virtual time, paired with fifo: a request of higher priority waits no longer with it."""

from __future__ import annotations

import asyncio
import random
from typing import Literal

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from aioinfer.testing import TimedLauncher, VirtualLoop
from tests.tiers import SECONDS, SIMULATION, grid, rest
from tests.toys import ToyDevice

STEP = 0.01
URGENT = 6


async def traffic(seed: int, admission: Literal["fifo", "pack"]) -> list[Result]:
    """More short requests than there are slots for, and a few of priority 9: the results of these."""
    dice = random.Random(seed)
    config = EngineConfig(
        model="toy",
        policy="priority",
        admission=admission,
        max_running_requests=dice.choice([1, 2, 4]),
        page_size=4,
        num_pages=400,
    )
    device = ToyDevice(num_pages=400, page_size=4, num_slots=config.num_slots)
    launcher = TimedLauncher(device, lambda step: STEP + 1e-4 * step.num_tokens)
    async with Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: None) as engine:

        async def ask(at: float, length: int, tokens: int, priority: int) -> Result:
            await asyncio.sleep(at)
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
            prompt = [dice.randrange(10, 60) for _ in range(length)]
            return await engine.generate(prompt, params, priority=priority)

        seconds, asking = 0.0, []
        for _ in range(60):
            seconds += dice.expovariate(config.running_requests / (2.5 * STEP))
            asking.append(ask(seconds, dice.randint(1, 6), dice.randint(2, 5), 0))
        urgent = [
            ask(dice.uniform(0, seconds), dice.randint(1, 60), dice.randint(1, 8), 9) for _ in range(URGENT)
        ]
        results = await asyncio.gather(*urgent, *asking)
        return results[:URGENT]


def waits(seed: int, admission: Literal["fifo", "pack"]) -> list[float]:
    """Seconds until the first step of each request of priority 9."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        results = runner.run(traffic(seed, admission))
    metrics = [result.metrics for result in results if result.metrics is not None]
    return [each.admitted - each.arrival for each in metrics if each.admitted is not None]


@rest(SECONDS)
@pytest.mark.parametrize("seeds", grid([range(6)], [range(6, 200)], SIMULATION))
def test_a_priority_waits_no_longer_with_packing_than_without(seeds: range) -> None:
    waited = []
    for seed in seeds:
        fifo, pack = waits(seed, "fifo"), waits(seed, "pack")
        assert len(fifo) == len(pack) == URGENT
        worse = [pair for pair in zip(fifo, pack, strict=True) if pair[1] > pair[0]]
        assert not worse, f"seed {seed}: {worse}"
        waited += pack
    assert max(waited) > STEP, "no slot was ever short"
