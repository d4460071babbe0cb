"""Templates of token ids on diffusion models: pinned tokens, and holes that are filled between them."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.diffusion.registry import usable_algorithms
from aioinfer.engine import Engine
from aioinfer.errors import InvalidRequest
from aioinfer.execution.launcher import ThreadLauncher
from aioinfer.outputs import Result
from aioinfer.params import DiffusionParams, SamplingParams
from tests.engine.block_parity import WAYS, Asked, answers
from tests.engine.block_worlds import Plain, check_logprobs, decode
from tests.engine.pinned import pinned_requests
from tests.engine.test_block_parity import LONGEST, SIZE, VOCAB, make_device, make_engine
from tests.tiers import SECONDS, rest, thinned
from tests.toys.blocks import ScriptedDevice

Expected = list[tuple[Asked, Plain]]


@functools.cache
def expected(algorithm: str) -> Expected:
    """Requests with templates and what the algorithm alone makes of them."""
    device = make_device(EngineConfig(page_size=SIZE))
    asked = pinned_requests(algorithm, SIZE, VOCAB)
    asked += pinned_requests(algorithm, SIZE, VOCAB, temperature=0.9, seed=7)[::5]
    asked += pinned_requests(algorithm, SIZE, VOCAB, repetition_penalty=1.5, frequency_penalty=1)[::5]
    asked += [(prompt, unended(params)) for prompt, params in asked[::7]]
    return list(zip(asked, decode(device, device.script, asked, LONGEST), strict=True))


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


def run(expected: Expected, **settings: Any) -> None:
    async def serve() -> None:
        async with make_engine(**settings) as engine:
            await check(engine, expected)

    asyncio.run(serve())


@rest(SECONDS)
@pytest.mark.parametrize("way", thinned(WAYS, 2))
def test_templates_are_filled_alike_in_every_way(way: str) -> None:
    some = [each for name in usable_algorithms(None) for each in expected(name)]
    run(some, max_running_requests=48, **WAYS[way])


@pytest.mark.parametrize("algorithm", ["low_confidence", "joint_threshold"])
@pytest.mark.parametrize("way", thinned(WAYS, 2))
def test_one_template_at_a_time_is_filled_alike(way: str, algorithm: str) -> None:
    # With each way others.
    some = expected(algorithm)[list(WAYS).index(way) :: 10]
    run(some, max_running_requests=1, prefix_cache=False, **WAYS[way])


async def test_an_algorithm_that_moves_tokens_knows_no_templates() -> None:
    device = ScriptedDevice(num_pages=64)
    config = EngineConfig(model="scripted", page_size=8)
    moving = DiffusionParams(algorithm="joint_threshold_indel")
    params = SamplingParams(template=[None, 9], diffusion=moving)
    async with Engine(config, launcher=lambda _: ThreadLauncher(device), tokenizer=lambda _: None) as engine:
        with pytest.raises(InvalidRequest) as caught:
            await engine.generate([3, 4], params)
        assert caught.value.field == "algorithm"
