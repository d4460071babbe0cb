"""Diffusion streams that are cut amid a block and go on by other weights: no block is a mixture."""

from __future__ import annotations

import asyncio

import pytest

from aioinfer import Engine, StreamCheckpoint
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.stream import Stream
from tests.engine.conftest import MakeEngine
from tests.sequences import sequence_of
from tests.tiers import SECONDS, rest
from tests.toys.blocks import ScriptedDevice

SIZE = 8
#: whose outputs grow by whole blocks
PARAMS = SamplingParams(
    temperature=0,
    max_tokens=40,
    ignore_eos=True,
    diffusion=DiffusionParams(algorithm="joint_threshold", threshold=0.9),
)
PROMPTS = [[number, *range(number % 3)] for number in range(1, 7)]


def scripted(make_engine: MakeEngine) -> Engine:
    device = ScriptedDevice(mean_steps=6.0, variation=0.3, edits=2)
    return make_engine(device=device, tokenizer=None, page_size=SIZE, max_rounds=1, overlap_steps=0)


async def cut(stream: Stream, *, tokens: int) -> StreamCheckpoint:
    """When some rounds of a block have resolved behind so many tokens, or more."""
    await stream.accepted()
    cursor = sequence_of(stream).cursor
    while True:
        checkpoint = stream.checkpoint()
        block = getattr(cursor, "under_way", None)
        if len(checkpoint.token_ids) >= tokens and block is not None and block.rounds > 1:
            return StreamCheckpoint.from_json(checkpoint.to_json())
        assert not stream.done
        await asyncio.sleep(0)


@rest(SECONDS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
async def test_a_block_without_output_begins_again_by_other_weights(
    make_engine: MakeEngine, prompt: list[int]
) -> None:
    async with scripted(make_engine) as engine:
        stream = engine.generate(prompt, PARAMS)
        stored = await cut(stream, tokens=0)
        stream.close()
        assert stored.block is not None
        assert not stored.token_ids
        await engine.update_weights({"weights": 1})
        wanted, found = await engine.generate(prompt, PARAMS), await engine.restore(stored)
        assert (found.token_ids, found.step_map) == (wanted.token_ids, wanted.step_map)
        assert found.weight_version == 1


@rest(SECONDS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
async def test_a_checkpoint_of_one_version_has_no_block_of_another(
    make_engine: MakeEngine, prompt: list[int]
) -> None:
    """Its newest token is of the weights before, and the block behind it of the new ones."""
    async with scripted(make_engine) as engine, scripted(make_engine) as other:
        stream = engine.generate(prompt, PARAMS)
        await cut(stream, tokens=1)
        await engine.update_weights({"weights": 1})
        stored = await cut(stream, tokens=1)
        stream.close()
        assert (stored.weight_version, engine.weight_version) == (0, 1)
        wanted, found = await other.generate(prompt, PARAMS), await other.restore(stored)
        assert (found.token_ids, found.step_map) == (wanted.token_ids, wanted.step_map)
        assert found.weight_version == 0
