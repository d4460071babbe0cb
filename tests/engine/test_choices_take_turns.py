"""A job of many parts and requests that arrive beside it, in virtual time."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise

import pytest

from aioinfer.config import EngineConfig, policy_names
from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from aioinfer.testing import TimedLauncher, VirtualLoop
from tests.toys import ToyDevice

STEP = 0.01
TOKENS = 4
PARTS = 40


async def started(policy: str, take_turns: bool) -> list[float]:
    """When each part of a job, and then each of five single requests, was admitted to the one slot."""
    config = EngineConfig(
        model="toy", policy=policy, max_running_requests=1, page_size=4, num_pages=64, overlap_steps=0
    )
    device = ToyDevice(num_pages=64, page_size=4, num_slots=config.num_slots)
    launcher = TimedLauncher(device, lambda step: STEP)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    async with Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: None) as engine:
        job = [
            engine.generate([1, 2, 3], params, queue_behind=part if take_turns else 0)
            for part in range(PARTS)
        ]
        single = []
        for at in range(5):
            await asyncio.sleep(STEP * TOKENS * 3)
            single.append(engine.generate([4, 5, 6 + at], params))
        results = [await stream for stream in [*job, *single]]
    return [
        result.metrics.admitted
        for result in results
        if result.metrics and result.metrics.admitted is not None
    ]


@pytest.mark.parametrize("policy", [name for name in policy_names() if name != "random"])
@pytest.mark.parametrize("take_turns", [True, False])
def test_a_job_of_many_parts_does_not_keep_others_waiting(policy: str, take_turns: bool) -> None:
    seed = random.randrange(1 << 32)
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(seed)) as runner:
        times = runner.run(started(policy, take_turns))
    assert len(times) == PARTS + 5
    job, single = times[:PARTS], times[PARTS:]
    assert job == sorted(job)
    assert single == sorted(single)
    before = [sum(part < time for part in job) for time in single]
    if take_turns:
        assert before[-1] < 3 * 5 + 5
        assert all(one < other for one, other in pairwise(before))
    else:
        assert before == [PARTS] * 5
