"""Logprobs: the model's own, one per token whatever happens, and the same from a hot cache as from a cold."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.outputs import Result, TokenLogprob
from aioinfer.params import Grammar, SamplingParams
from aioinfer.scheduling.step import Step
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.test_transparency import retract_every
from tests.tiers import SECONDS, rest
from tests.toys.device import toy_generate, toy_logprob

PROMPT = list(range(100, 140))


@functools.cache
def reference() -> Any:
    """The bundled model in float32, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    path = EngineConfig().model_path
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()


def wanted_logprobs(ids: list[int]) -> Any:
    """Log-softmax of every position's next token in float32, by transformers: [len(ids), vocabulary]."""
    import torch

    with torch.inference_mode():
        return reference()(torch.tensor([ids])).logits[0].float().log_softmax(-1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, max_tokens=12, logprobs=5, prompt_logprobs=3),
        SamplingParams(temperature=2.0, seed=3, top_p=0.9, max_tokens=12, logprobs=5, prompt_logprobs=0),
        SamplingParams(temperature=1.0, seed=3, repetition_penalty=3.0, max_tokens=12, logprobs=0),
        SamplingParams(seed=5, max_tokens=12, logprobs=2, grammar=Grammar("regex", "[a-z ]{30}")),
        SamplingParams(
            temperature=0.5,
            seed=7,
            max_tokens=12,
            logprobs=4,
            prompt_logprobs=20,
            logit_bias={75: 9.0, 90: -50.0},
            allowed_token_ids=range(50, 300),
        ),
    ],
    ids=["greedy", "filtered", "penalised", "constrained", "steered"],
)
async def test_logprobs_are_those_of_transformers(params: SamplingParams) -> None:
    async with Engine(EngineConfig(dtype="float32", threads=1, chunk_size=16)) as engine:
        other = engine.generate(PROMPT[:7], SamplingParams(temperature=0, max_tokens=30))
        result = await engine.generate(PROMPT, params)
        await other
    check_all(PROMPT, params, result)


def check_all(prompt: list[int], params: SamplingParams, result: Result) -> None:
    """All logprobs of a result, to 1e-4."""
    wanted = wanted_logprobs([*prompt, *result.token_ids])
    assert result.logprobs is not None
    assert len(result.logprobs) == len(result.token_ids)
    for at, (token, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True)):
        check(logprob, token, wanted[len(prompt) - 1 + at], params.logprobs or 0)
    if params.prompt_logprobs is None:
        assert result.prompt_logprobs is None
        return
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    assert len(result.prompt_logprobs) == len(prompt)
    for at, logprob in enumerate(result.prompt_logprobs[1:], 1):
        assert logprob is not None
        check(logprob, prompt[at], wanted[at - 1], params.prompt_logprobs)


def check(found: TokenLogprob, token: int, wanted: Any, top: int) -> None:
    assert found.token_id == token
    assert found.logprob == pytest.approx(float(wanted[token]), abs=1e-4)
    assert len(found.top) == top
    values = wanted.topk(max(top, 1)).values.tolist()
    assert [value for _, value in found.top] == pytest.approx(values[:top], abs=1e-4)
    for likely, value in found.top:
        assert value == pytest.approx(float(wanted[likely]), abs=1e-4)


@rest(SECONDS)
@pytest.mark.parametrize(("window", "page_size"), [(0, 16), (2, 4)])
async def test_hot_and_cold_are_those_of_transformers_whoever_else_runs(window: Any, page_size: int) -> None:
    """A first turn from nothing, the same again from the cache, and a second turn that finds the first one's
    answer there; side by side with others that start with the same tokens."""
    params = SamplingParams(temperature=1.2, seed=3, max_tokens=10, ignore_eos=True, logprobs=3)
    scored = dataclasses.replace(params, seed=4, prompt_logprobs=1)
    config = EngineConfig(
        dtype="float32", threads=1, overlap_steps=window, page_size=page_size, chunk_size=24
    )
    async with Engine(config) as engine:

        async def turn(prompts: list[list[int]], params: SamplingParams) -> list[Result]:
            results = await asyncio.gather(*[engine.generate(prompt, params) for prompt in prompts])
            for prompt, result in zip(prompts, results, strict=True):
                check_all(prompt, params, result)
            return results

        prompts = [[*PROMPT, *[number] * number] for number in range(1, 5)]
        cold = await turn(prompts, params)
        hot = await turn(prompts, params)
        assert [result.token_ids for result in hot] == [result.token_ids for result in cold]
        for before, after in zip(cold, hot, strict=True):
            assert after.usage.cached_tokens >= 32 >= before.usage.cached_tokens
        longer = [[*prompt, *result.token_ids, 5, 6] for prompt, result in zip(prompts, cold, strict=True)]
        for second in await turn(longer, params):
            assert second.usage.cached_tokens >= 48
        assert {result.usage.cached_tokens for result in await turn(longer, scored)} == {0}


@pytest.mark.parametrize("every", [0, 3])
@pytest.mark.parametrize("window", [0, 1, 2])
async def test_there_is_one_record_per_token_whatever_happens(
    make_engine: MakeEngine, window: int, every: int
) -> None:
    """Through chunks, retraction, neighbours without logprobs, and in every chunk of the stream."""
    async with make_engine(overlap_steps=window, num_pages=40, chunk_size=8, share_prefix_tokens=4) as engine:
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


def test_how_many_are_wanted_is_checked() -> None:
    for name in ("logprobs", "prompt_logprobs"):
        for value in (-1, 21, 1.5, True):
            with pytest.raises(errors.InvalidRequest, match=name):
                SamplingParams(**{name: value})


async def test_scores_behind_a_failed_step_are_not_kept_though_the_request_was_retracted(
    make_engine: MakeEngine, gate: Gate
) -> None:
    """Its first chunks were scored before, and are computed again; the step that fails has no scores, and the
    one behind it has junk."""
    failing: list[int] = []

    def fault(step: Step) -> None:
        gate(step)
        if step.id in failing:
            raise RuntimeError("injected")

    prompt, params = list(range(1, 21)), SamplingParams(max_tokens=0, prompt_logprobs=0)
    settings = {"overlap_steps": 2, "plan_late": False, "max_overlapped_prefill": 64}
    async with make_engine(fault=fault, chunk_size=4, **settings) as engine:
        stream = engine.generate(prompt, params)
        await asyncio.to_thread(gate.arrived.acquire)
        pausing = asyncio.ensure_future(engine.pause())
        gate.step(3)
        await pausing
        queues = engine._serving().core.scheduler.queues
        (sequence,) = queues.running.values()
        assert len(sequence.output.prompt_logprobs) == 12
        queues.retract(sequence)
        memory = queues.memory
        assert memory.tree is not None
        memory.pages.drop(memory.tree.evict(1, queues.last_step), queues.last_step)
        failing.append(queues.last_step + 1)
        engine.resume()
        while engine.stats().steps_in_flight < 3:
            await asyncio.sleep(0)
        queues.retract(sequence)
        gate.release()
        result = await stream
    assert result.prompt_logprobs is not None
    for at, found in enumerate(result.prompt_logprobs[1:], 1):
        assert found == toy_logprob(at, prompt[at])
