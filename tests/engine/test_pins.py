"""Templates of token ids on diffusion models: pinned tokens, and holes that are filled between them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from aioinfer.config import EngineConfig
from aioinfer.diffusion.registry import algorithm_names
from aioinfer.engine import Engine
from aioinfer.outputs import Result
from aioinfer.params import SamplingParams
from tests.engine.block_parity import WAYS, Asked, answers
from tests.engine.block_worlds import Plain, check_logprobs, decode
from tests.engine.pinned import pinned_requests
from tests.engine.test_block_parity import LONGEST, SIZE, VOCAB, make_device, make_engine
from tests.tiers import SECONDS, rest, thinned

Expected = list[tuple[Asked, Plain]]


@pytest.fixture(scope="module")
def expected() -> dict[str, Expected]:
    """By algorithm, requests with templates and what the algorithm alone makes of them."""
    device, found = make_device(EngineConfig(page_size=SIZE)), {}
    for algorithm in algorithm_names():
        asked = pinned_requests(algorithm, SIZE, VOCAB)
        asked += pinned_requests(algorithm, SIZE, VOCAB, temperature=0.9, seed=7)[::5]
        asked += pinned_requests(algorithm, SIZE, VOCAB, repetition_penalty=1.5, frequency_penalty=1)[::5]
        asked += [(prompt, unended(params)) for prompt, params in asked[::7]]
        found[algorithm] = list(zip(asked, decode(device, device.script, asked, LONGEST), strict=True))
    return found


def unended(params: SamplingParams) -> SamplingParams:
    """The model's end token is not written into holes."""
    assert params.template is not None
    count = len(params.template)
    return replace(params, ignore_eos=False, max_tokens=count, min_tokens=count)


async def check(engine: Engine, expected: Expected) -> None:
    for result, (asked, plain) in zip(
        await answers(engine, [asked for asked, _ in expected]), expected, strict=True
    ):
        same(result, asked, plain)


def same(result: Result, asked: Asked, plain: Plain) -> None:
    template = asked[1].template
    assert template is not None
    for token, pin in zip(result.token_ids, template, strict=False):
        assert pin is None or token == pin
    assert result.token_ids == plain.ids, asked
    assert result.step_map == plain.steps, asked
    assert result.logprobs is not None
    check_logprobs(result.logprobs, plain, asked[1])
    assert result.finish_reason == "length"


@pytest.mark.parametrize("way", thinned(WAYS, 3))
def test_templates_are_filled_alike_in_every_way(way: str, expected: dict[str, Expected]) -> None:
    async def run() -> None:
        async with make_engine(max_running_requests=48, **WAYS[way]) as engine:
            await check(engine, [each for some in expected.values() for each in some])

    asyncio.run(run())


@rest(SECONDS)
@pytest.mark.parametrize("way", thinned(WAYS, 2))
def test_one_template_at_a_time_is_filled_alike(way: str, expected: dict[str, Expected]) -> None:
    async def run() -> None:
        async with make_engine(max_running_requests=1, prefix_cache=False, **WAYS[way]) as engine:
            await check(engine, [each for some in expected.values() for each in some[::3]])

    asyncio.run(run())
