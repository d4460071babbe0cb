"""Deadlines of a diffusion engine: waiting ends with the first row, whenever that comes."""

from __future__ import annotations

import asyncio

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import TimedOut
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.testing import TimedLauncher, VirtualLoop
from tests.toys.blocks import ScriptedDevice

SIZE, STEP = 8, 0.01


def params(blocks: int) -> SamplingParams:
    diffusion = DiffusionParams(threshold=0.9)
    return SamplingParams(temperature=0.0, max_tokens=blocks * SIZE, ignore_eos=True, diffusion=diffusion)


@pytest.mark.parametrize("phase", ["waiting", "running"])
def test_who_lost_its_place_before_its_first_row_has_waited_until_it_gets_one(phase: str) -> None:
    """Where prompts have steps of their own, one of less than a block is let in without a row."""
    config = EngineConfig(
        model="scripted",
        page_size=SIZE,
        max_running_requests=2,
        mixed=False,
        policy="priority",
        preemption=True,
        overlap_steps=0,
    )
    device = ScriptedDevice(num_slots=config.num_slots, mean_steps=4.0, variation=0.0)
    launcher = TimedLauncher(device, lambda _: STEP)

    async def run() -> None:
        async with Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: None) as engine:
            long = engine.generate([3] * 3 * SIZE, params(1))
            deadlines = {name: 20 * STEP if name == phase else None for name in ("waiting", "running")}
            short = engine.generate(
                *([2], params(12)),
                waiting_timeout=deadlines["waiting"],
                running_timeout=deadlines["running"],
            )
            await asyncio.sleep(STEP / 2)
            assert not short.admitted
            urgent = engine.generate([4], params(1), priority=1)
            await asyncio.gather(long, urgent)
            if phase == "waiting":
                assert len((await short).token_ids) == 12 * SIZE
                return
            with pytest.raises(TimedOut, match="running"):
                await short

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
