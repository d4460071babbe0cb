"""Logit bias and allowed tokens: on their own rows only, and the same with any window."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from tests.engine.asking import greedy_ids

PROMPT = list(range(100, 120))


@pytest.mark.parametrize("window", [0, 1, 2])
async def test_biases_and_allowed_tokens_steer_their_own_rows_only(window: Any) -> None:
    async with Engine(EngineConfig(overlap_steps=window, threads=1, dtype="float32")) as engine:
        ids = partial(greedy_ids, engine, PROMPT, max_tokens=8)
        plain = await ids()
        beside = engine.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        assert await ids(logit_bias={333: 100.0}) == [333] * 8
        assert plain[0] not in await ids(logit_bias={plain[0]: -100.0})
        assert set(await ids(allowed_token_ids=[7, 500, 863])) <= {7, 500, 863}
        assert set(await ids(temperature=5.0, seed=1, allowed_token_ids=[3, 31, 32])) <= {3, 31, 32}
        both = await ids(logit_bias={31: 50.0}, allowed_token_ids=[31, 32], repetition_penalty=2.0)
        assert set(both) <= {31, 32}
        assert (await beside).token_ids == plain
        assert await ids() == plain, "a slot forgets its former tenant's wishes"


def test_what_makes_no_sense_is_refused() -> None:
    for name, value in (
        ("logit_bias", {3: 101}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"3": 1}),
        ("logit_bias", [3]),
        ("logit_bias", dict.fromkeys(range(2000), 1.0)),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [1.5]),
    ):
        with pytest.raises(errors.InvalidRequest, match=name):
            SamplingParams(**{name: value})


async def test_ids_beyond_the_vocabulary_are_refused() -> None:
    async with Engine(EngineConfig(threads=1)) as engine:
        for params in (SamplingParams(logit_bias={864: 1.0}), SamplingParams(allowed_token_ids=[864])):
            with pytest.raises(errors.InvalidRequest):
                engine.generate(PROMPT, params)
