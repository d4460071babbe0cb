"""Logprobs: the model's own, one per token whatever happens, and the same from a hot cache as from a cold."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.llm import LLM
from aioinfer.outputs import TokenLogprob
from aioinfer.params import Grammar, SamplingParams
from aioinfer.twin.toy import toy_generate, toy_logprob
from tests.engine.conftest import MakeEngine
from tests.engine.test_transparency import retract_every

PROMPT = list(range(100, 140))


def wanted_logprobs(ids: list[int]) -> Any:
    """Log-softmax of every position's next token in float32, by transformers: [len(ids), vocabulary]."""
    import torch
    from transformers import AutoModelForCausalLM

    path = EngineConfig().model_path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    with torch.inference_mode():
        return model(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=12, logprobs=5, prompt_logprobs=3),
        SamplingParams(temperature=2.0, seed=3, top_p=0.9, max_tokens=12, logprobs=5, prompt_logprobs=0),
        SamplingParams(temperature=1.0, seed=3, repetition_penalty=3.0, max_tokens=12, logprobs=0),
        SamplingParams(seed=5, max_tokens=12, logprobs=2, grammar=Grammar("regex", "[a-z ]{30}")),
    ],
    ids=["greedy", "filtered", "penalised", "constrained"],
)
async def test_logprobs_are_those_of_transformers(params: SamplingParams) -> None:
    async with Engine(EngineConfig(dtype="float32", threads=1, chunk_size=16)) as engine:
        other = engine.generate(PROMPT[:7], SamplingParams(temperature=0, max_tokens=30))
        result = await engine.generate(PROMPT, params)
        await other
    wanted = wanted_logprobs([*PROMPT, *result.token_ids])
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids)
    for at, (token, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        check(logprob, token, wanted[len(PROMPT) - 1 + at], params.logprobs or 0)
    if params.prompt_logprobs is None:
        assert result.prompt_logprobs is None
        return
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(PROMPT)
    for at, logprob in enumerate(result.prompt_logprobs[1:], 1):
        assert logprob is not None
        check(logprob, PROMPT[at], wanted[at - 1], params.prompt_logprobs)


def check(found: TokenLogprob, token: int, wanted: Any, top: int) -> None:
    assert found.token_id == token
    assert found.logprob == pytest.approx(float(wanted[token]), abs=1e-4)
    assert len(found.top) == top
    values = wanted.topk(max(top, 1)).values.tolist()
    assert [value for _, value in found.top] == pytest.approx(values[:top], abs=1e-4)
    for likely, value in found.top:
        assert value == pytest.approx(float(wanted[likely]), abs=1e-4)


async def test_the_hot_cache_gives_the_same_logprobs_as_the_cold_one() -> None:
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, prompt_logprobs=1)
    plain = SamplingParams(temperature=0, max_tokens=8)
    async with Engine(EngineConfig(dtype="float32", threads=1)) as engine:
        cold = await engine.generate(PROMPT, params)
        assert (await engine.generate(PROMPT, plain)).usage.cached_tokens == 32
        hot = await engine.generate(PROMPT, params)
        assert hot.usage.cached_tokens == 0, "what is to be scored is computed"
        assert hot.token_ids == cold.token_ids
        for name in ("logprobs", "prompt_logprobs"):
            found = [each.logprob for each in getattr(hot, name) if each is not None]
            wanted = [each.logprob for each in getattr(cold, name) if each is not None]
            assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("window", [0, 1, 2])
async def test_there_is_one_record_per_token_whatever_happens(
    make_engine: MakeEngine, window: int, every: int
) -> None:
    """Through chunks, retraction, neighbours without logprobs, and in every chunk of the stream."""
    async with make_engine(window=window, num_pages=40, chunk_size=8, share_prefix_tokens=4) as engine:
        retract_every(engine, every)

        async def one(number: int) -> None:
            prompt = [5] * 12 + [number + 1] * (number % 5)
            with_prompt = number % 2 == 0
            params = SamplingParams(
                seed=number,
                max_tokens=20,
                logprobs=0,
                prompt_logprobs=0 if with_prompt else None,
                ignore_eos=True,
            )
            ids: list[int] = []
            logprobs: list[TokenLogprob] = []
            stream = engine.generate(prompt, params)
            async for chunk in stream:
                assert chunk.logprobs is not None
                assert len(chunk.logprobs) == len(chunk.token_ids)
                ids += chunk.token_ids
                logprobs += chunk.logprobs
            assert ids == toy_generate(prompt, params, seed=number)
            assert logprobs == [toy_logprob(len(prompt) + at, token) for at, token in enumerate(ids)]
            assert stream.result().logprobs == logprobs
            if with_prompt:
                wanted = [None, *[toy_logprob(at, prompt[at]) for at in range(1, len(prompt))]]
                assert stream.result().prompt_logprobs == wanted

        async def without(number: int) -> None:
            params = SamplingParams(temperature=0, max_tokens=20)
            result = await engine.generate([5] * 12 + [number], params)
            assert result.logprobs is None
            assert result.prompt_logprobs is None

        await asyncio.gather(*[one(number) for number in range(8)], *[without(number) for number in range(8)])
        assert not every or engine.stats().retractions > 0


def test_the_synchronous_twin_reports_them_too() -> None:
    with LLM(EngineConfig(threads=1)) as llm:
        (result,) = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=3, logprobs=1))
        assert result.logprobs is not None
        assert [each.top[0][0] for each in result.logprobs] == result.token_ids


def test_how_many_are_wanted_is_checked() -> None:
    for name in ("logprobs", "prompt_logprobs"):
        for value in (-1, 21, 1.5, True):
            with pytest.raises(errors.InvalidRequest, match=name):
                SamplingParams(**{name: value})
