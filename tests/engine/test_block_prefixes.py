"""The prefix cache of a diffusion engine: whole blocks whose tokens are final, computed once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams
from tests.engine.block_parity import Asked, answers, logprobs, to_the_end
from tests.engine.block_worlds import decode
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.engine.worlds import VOCAB
from tests.toys.blocks import ScriptedDevice

SIZE, LONGEST = 4, 40
SETTINGS: list[dict[str, Any]] = [
    {"overlap_steps": 0},
    {"overlap_steps": 2},
    {"fused_commit": False},
    {"mixed": False},
    {"chunk_size": 2 * SIZE},
    {"page_size": 2 * SIZE},
    {"max_rounds": 4, "overlap_steps": 0},
    {"diffusion_mode": "sync"},
]


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=count)


def ask(prompt: list[int], max_tokens: int, algorithm: str = "low_confidence") -> Asked:
    edits = {"max_post_edits": 2} if algorithm == "joint_threshold" else {}
    return prompt, to_the_end(DiffusionParams(algorithm=algorithm, threshold=0.9, **edits), max_tokens)


def scripted(make_engine: MakeEngine, **settings: Any) -> tuple[Engine, ScriptedDevice]:
    settings = {"page_size": SIZE, "num_pages": 40, "overlap_steps": 1, **settings}
    device = ScriptedDevice(
        num_pages=40,
        page_size=settings["page_size"],
        max_model_len=LONGEST,
        block_size=SIZE,
        vocab_size=VOCAB,
        mask_token_id=7,
        mean_steps=2.5,
        # Nearly every token of an answer that may be edited is.
        edits=12,
    )
    return make_engine(device=device, **settings), device


def check(device: ScriptedDevice, asked: Sequence[Asked], results: Sequence[Result]) -> None:
    for result, plain in zip(results, decode(device, device.script, asked, LONGEST), strict=True):
        assert (result.token_ids, result.step_map, logprobs(result)) == (
            plain.ids,
            plain.steps,
            plain.logprobs,
        )


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
async def test_prompts_that_arrive_together_compute_their_common_beginning_once(
    make_engine: MakeEngine, settings: dict[str, Any]
) -> None:
    common = tokens(4 * SIZE)
    asked = [ask([*common, *tokens(count, count)], 6) for count in (3, 3, 5)]
    engine, device = scripted(make_engine, share_prefix_tokens=2 * SIZE, **settings)
    async with engine:
        results = await answers(engine, asked)
        await settle(engine)
    check(device, asked, results)
    assert [result.usage.cached_tokens for result in results] == [0, 4 * SIZE, 4 * SIZE]


@pytest.mark.parametrize("algorithm", ["low_confidence", "joint_threshold"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
async def test_the_next_turn_of_a_chat_finds_what_was_generated(
    make_engine: MakeEngine, settings: dict[str, Any], algorithm: str
) -> None:
    first = ask(tokens(2 * SIZE + 1), 4 * SIZE, algorithm)
    engine, device = scripted(make_engine, **settings)
    async with engine:
        (answer,) = await answers(engine, [first])
        assert len(answer.token_ids) == 4 * SIZE
        turn = ask([*first[0], *answer.token_ids, *tokens(SIZE + 1, 2)], SIZE + 1, algorithm)
        (found,) = await answers(engine, [turn])
        page = engine.config.page_size or 0
        await settle(engine)
    check(device, [first, turn], [answer, found])
    # The output ends in the block behind these, so that nobody ever knew the whole of it.
    known = (len(first[0]) + len(answer.token_ids)) // SIZE * SIZE
    least = known - SIZE  # the last block is not committed if nothing comes behind it
    assert least // page * page <= found.usage.cached_tokens <= known // page * page


async def test_pages_are_exchanged_for_those_of_another_while_rounds_are_in_flight(
    make_engine: MakeEngine,
) -> None:
    """Two compute the same without waiting for each other; who comes second takes the other's pages."""
    prompt = tokens(4 * SIZE + 1)
    for window in (0, 1, 2):
        asked = [ask(prompt, 3 * SIZE), ask(prompt, 3 * SIZE + 2)]
        engine, device = scripted(make_engine, share_prefix_tokens=0, overlap_steps=window)
        async with engine:
            await engine.pause()
            streams = [engine.generate(*each) for each in asked]
            engine.resume()
            results = await asyncio.gather(*streams)
            held = -(-(len(prompt) + 3 * SIZE + 2) // SIZE)
            assert engine.stats().pages_cached <= held, "what is the same is kept once"
            await settle(engine)
        check(device, asked, results)
        assert [result.usage.cached_tokens for result in results] == [0, 0]
