"""The laws of the design, over random request lifetimes on a diffusion model that is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.testing import TimedLauncher, VirtualLoop
from tests.engine.block_worlds import COMBINATIONS, decode, make_block_world, random_params
from tests.engine.laws import BlockLaws, watch
from tests.engine.simulation import retract_one, settle, simulate
from tests.engine.worlds import VOCAB
from tests.tiers import SECONDS, grid, rest, scaled
from tests.toys import ToyTokenizer
from tests.toys.blocks import ScriptedDevice, scripted_generate

LIFETIMES = 24
#: every combination of mode, fused commit, mixing, multi_step and cache, once, or a share of them
WORLDS = random.Random(0).sample(range(len(COMBINATIONS)), scaled(len(COMBINATIONS), 32))


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


@rest(SECONDS)
def test_what_the_worlds_expect_is_what_one_request_alone_gets() -> None:
    rng = random.Random(5)
    device = ScriptedDevice(block_size=4, page_size=4, vocab_size=VOCAB, edits=2)
    for _ in range(12):
        params = random_params(rng)
        prompt = rng.choices(range(VOCAB), k=rng.randint(1, 9))
        (plain,) = decode(device, device.script, [(prompt, params)], 40)
        alone = scripted_generate(
            device.script, prompt, params, seed=params.seed or 0, block_size=4, max_length=40
        )
        assert plain.ids == alone
        assert len(plain.steps) == len(plain.logprobs) == len(alone)


@rest(SECONDS)
@pytest.mark.parametrize("window", grid([1], [0, 2]))
def test_cancels_in_mid_block_leave_nothing_behind(window: int) -> None:
    assert storm(400, window) >= 400


def storm(cancels: int, window: int = 1) -> int:
    """Cancel requests at random moments until so many were in the middle of a block; returns how many.

    ``python -c "from tests.engine.test_block_laws import storm; print(storm(10_000))"``
    """
    running, size = 64, 8
    config = EngineConfig(
        model="scripted", page_size=size, max_running_requests=running, overlap_steps=window, seed=window
    )
    device = ScriptedDevice(
        num_pages=4 * running, num_slots=config.num_slots, max_model_len=20 * size, mean_steps=6.0
    )
    rng = random.Random(window)
    launcher = TimedLauncher(device, lambda _: 0.01)
    engine = Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: ToyTokenizer(VOCAB))

    async def client(checker: BlockLaws) -> None:
        algorithms = ("low_confidence", "joint_threshold")
        while checker.ended_in_mid_block < cancels:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=100,
                ignore_eos=True,
                diffusion=DiffusionParams(algorithm=rng.choice(algorithms), threshold=0.9),
            )
            prompt = rng.choices(range(VOCAB), k=rng.randint(1, 20))
            if rng.random() < 0.1:
                retract_one(engine)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0.01, 0.06)):
                    await engine.generate(prompt, params)

    async def run() -> int:
        await engine.start()
        checker = watch(engine)
        assert isinstance(checker, BlockLaws)
        async with asyncio.TaskGroup() as group:
            for _ in range(running + 8):
                group.create_task(client(checker))
        assert engine.stats().retractions > 0
        await settle(engine)
        await engine.aclose()
        return checker.ended_in_mid_block

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(window)) as runner:
        return runner.run(run())
