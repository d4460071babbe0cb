"""Amid a block: who wants in does not wait for its end, it fails alone, and no other weights finish it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from aioinfer import Engine, StreamCheckpoint, errors
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.scheduling.step import Step
from aioinfer.stream import Stream
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.sequences import sequence_of
from tests.tiers import SECONDS, grid, rest
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


# -- streams that are cut amid a block and go on by other weights: no block is a mixture --------------------

#: whose outputs grow by whole blocks
WHOLE = SamplingParams(
    temperature=0,
    max_tokens=40,
    ignore_eos=True,
    diffusion=DiffusionParams(algorithm="joint_threshold", threshold=0.9),
)
PROMPTS = [[number, *range(number % 3)] for number in range(1, 7)]


def scripted(make_engine: MakeEngine, gate: Gate | None = None) -> Engine:
    device = ScriptedDevice(mean_steps=6.0, variation=0.3, edits=2, fault=gate)
    return make_engine(device=device, tokenizer=None, page_size=SIZE, max_rounds=1, overlap_steps=0)


async def cut(stream: Stream, gate: Gate, when: Callable[[StreamCheckpoint], bool]) -> StreamCheckpoint:
    """Amid a block of which some rounds have resolved. The step behind them runs."""
    await stream.accepted()
    cursor = sequence_of(stream).cursor
    while True:
        await asyncio.to_thread(gate.arrived.acquire)
        checkpoint = stream.checkpoint()
        gate.step()
        block = getattr(cursor, "under_way", None)
        if block is not None and block.rounds > 1 and when(checkpoint):
            return StreamCheckpoint.from_json(checkpoint.to_json())
        assert not stream.done


@rest(SECONDS)
@pytest.mark.parametrize("prompt", grid(PROMPTS[:3], PROMPTS[3:]), ids=str)
async def test_a_block_without_output_begins_again_by_other_weights(
    make_engine: MakeEngine, gate: Gate, prompt: list[int]
) -> None:
    async with scripted(make_engine, gate) as engine:
        stream = engine.generate(prompt, WHOLE)
        stored = await cut(stream, gate, lambda stored: True)
        stream.close()
        gate.release()
        assert stored.block is not None
        assert not stored.token_ids
        await engine.update_weights({"weights": 1})
        wanted, found = await engine.generate(prompt, WHOLE), await engine.restore(stored)
        assert (found.token_ids, found.step_map) == (wanted.token_ids, wanted.step_map)
        assert found.weight_version == 1


@rest(SECONDS)
@pytest.mark.parametrize("prompt", grid(PROMPTS[:3], PROMPTS[3:]), ids=str)
async def test_a_checkpoint_of_one_version_has_no_block_of_another(
    make_engine: MakeEngine, gate: Gate, prompt: list[int]
) -> None:
    """Its newest token is of the weights before, and the block behind it of the new ones."""
    async with scripted(make_engine, gate) as engine, scripted(make_engine) as other:
        stream = engine.generate(prompt, WHOLE)
        await cut(stream, gate, lambda stored: len(stored.token_ids) > 0)
        updating = asyncio.ensure_future(engine.update_weights({"weights": 1}))
        stored = await cut(stream, gate, lambda stored: engine.weight_version == 1)
        gate.release()
        await updating
        stream.close()
        assert (stored.weight_version, engine.weight_version) == (0, 1)
        wanted, found = await other.generate(prompt, WHOLE), await other.restore(stored)
        assert (found.token_ids, found.step_map) == (wanted.token_ids, wanted.step_map)
        assert found.weight_version == 0
