"""Rounds in place: who wants in does not wait for the block."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from aioinfer import errors
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.scheduling.step import Step
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.toys.blocks import ScriptedDevice, scripted_generate

SIZE = 8
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=SIZE, ignore_eos=True, diffusion=DiffusionParams(threshold=0.9)
)


@pytest.mark.parametrize(("what", "forwards"), [("nothing", 5), ("arrival", 1), ("cancel", 1)])
async def test_rounds_go_on_in_place_until_somebody_wants_something(
    make_engine: MakeEngine, gate: Gate, what: str, forwards: int
) -> None:
    """Forwards of a step of two requests, if that happens after its launch."""
    begun = []

    def held(step: Step) -> None:
        begun.append(device.forwards)
        gate(step)

    device = ScriptedDevice(mean_steps=6.0, variation=0.0, fault=held)
    settings = {"page_size": SIZE, "max_rounds": 50, "overlap_steps": 0, "prefix_cache": False}
    async with make_engine(device=device, tokenizer=None, **settings) as engine:
        streams = [engine.generate([number], PARAMS) for number in (1, 2)]
        await asyncio.to_thread(gate.arrived.acquire)
        if what == "arrival":
            streams.append(engine.generate([3], PARAMS))
        elif what == "cancel":
            await streams.pop().aclose()
        gate.release()
        await asyncio.gather(*streams)
    assert [*begun, device.forwards][1] == forwards


async def test_a_block_whose_logits_are_not_finite_fails_its_request_alone(make_engine: MakeEngine) -> None:
    device, broken = ScriptedDevice(), [True]
    async with make_engine(device=device, tokenizer=None) as engine:
        forward = device._lm.forward

        def breaking(*given: Any) -> torch.Tensor:
            logits = forward(*given)
            if len(logits) > SIZE and broken:
                broken.clear()
                logits[:SIZE] = torch.nan
            return logits

        device._lm.forward = breaking  # type: ignore[method-assign]
        streams = [engine.generate([number], PARAMS) for number in (1, 2, 3)]
        found = await asyncio.gather(*streams, return_exceptions=True)
        await settle(engine)
    (failed,) = [each for each in found if isinstance(each, BaseException)]
    assert isinstance(failed, errors.StepFailed)
    assert "finite" in str(failed)
    for number, result in enumerate(found, 1):
        wanted = scripted_generate(device.script, [number], PARAMS)
        assert result is failed or getattr(result, "token_ids", None) == wanted
