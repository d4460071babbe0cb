"""Searches of an engine: best-of and beams, which are streams that fork."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioinfer import (
    Engine,
    EngineConfig,
    InvalidRequest,
    ProcessorFailed,
    Result,
    SamplingParams,
    TokenBudget,
)
from aioinfer.client.search import ScoredResult
from aioinfer.parallel import Dispatcher
from tests.engine.beam_oracle import Search, must_equal, random_model, searches
from tests.engine.conftest import MakeEngine
from tests.engine.test_chat import freed
from tests.parallel.toys import toys
from tests.tiers import SECONDS, grid, rest


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    """Two random models of transformers, and their files."""
    found = {}
    for prefix, vocab in (("Qwen3", 131), ("Llama", 300)):
        path = tmp_path_factory.mktemp(prefix)
        model = random_model(prefix, vocab, seed=7)
        model.save_pretrained(path)
        found[prefix] = model, path
    return found


def engine_of(path: Path, **settings: Any) -> Engine:
    usual = {"dtype": "float32", "num_pages": 512, "page_size": 4, "threads": 1, "max_running_requests": 16}
    return Engine(EngineConfig(model=str(path), **{**usual, **settings}))


async def ours(engine: Engine, search: Search, **params: Any) -> list[ScoredResult]:
    return await engine.beam(
        search.prompt,
        search.width,
        SamplingParams(max_tokens=search.limit, stop_token_ids=sorted(search.end), **params),
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
    )


async def check(model: Any, engine: Engine, width: int, count: int) -> None:
    ties = 0
    for search in searches(model, count, width):
        found = await ours(engine, search)
        ties += not must_equal(model, search, [(each.result.token_ids, each.score) for each in found])
        for each in found:
            ended = each.result.token_ids[-1] in search.end
            assert each.result.finish_reason == ("stop" if ended else "length")
    assert ties <= count // 10
    await freed(engine)


@pytest.mark.parametrize("width", [2, 4, 10])
async def test_beams_are_those_of_transformers(models: dict[str, Any], width: int) -> None:
    model, path = models["Qwen3"]
    async with engine_of(path) as engine:
        await check(model, engine, width, 2)


@rest(SECONDS)
@pytest.mark.parametrize("prefix", grid(["Qwen3"], ["Llama"]))
@pytest.mark.parametrize("width", [2, 4, 10])
async def test_beams_are_those_of_transformers_for_fifty_prompts(
    models: dict[str, Any], prefix: str, width: int
) -> None:
    model, path = models[prefix]
    async with engine_of(path) as engine:
        await check(model, engine, width, 50)


@rest(SECONDS)
async def test_searches_side_by_side_share_too_few_slots_and_pages(models: dict[str, Any]) -> None:
    model, path = models["Qwen3"]
    wanted = searches(model, 6, width=4)
    async with engine_of(path, max_running_requests=3, num_pages=60) as engine:
        found = await asyncio.gather(*[ours(engine, search) for search in wanted])
        await freed(engine)
    for search, each in zip(wanted, found, strict=True):
        must_equal(model, search, [(one.result.token_ids, one.score) for one in each])


async def test_beams_that_meet_the_end_of_the_context_are_of_the_length_that_is_left(
    models: dict[str, Any],
) -> None:
    model, path = models["Qwen3"]
    (search,) = searches(model, 1, width=4)
    search = search._replace(prompt=[*range(2, 127)], end=frozenset({130}), limit=3)
    async with engine_of(path) as engine:
        found = await engine.beam(search.prompt, 4, SamplingParams(stop_token_ids=[130]))
        must_equal(model, search, [(each.result.token_ids, each.score) for each in found])
        longest = [*range(2, 129), 5]
        with pytest.raises(InvalidRequest) as refused:
            await engine.beam(longest, 4)
        assert refused.value.code == "context_length_exceeded"
        await freed(engine)


async def test_a_bias_and_processors_change_what_is_found(models: dict[str, Any]) -> None:
    _, path = models["Qwen3"]

    def without(ids: Any, logits: Any) -> None:
        logits[banned] = -np.inf

    async with engine_of(path) as engine:
        plain = await engine.beam([3, 4], 3, SamplingParams(max_tokens=8))
        banned = plain[0].result.token_ids[0]
        biased = await engine.beam([3, 4], 3, SamplingParams(max_tokens=8, logit_bias={banned: -100.0}))
        steered = await engine.beam([3, 4], 3, SamplingParams(max_tokens=8, logits_processors=[without]))
    assert all(banned not in each.result.token_ids for each in biased + steered)
    assert [each.result.token_ids for each in biased] == [each.result.token_ids for each in steered]
    assert [each.score for each in biased] == pytest.approx([each.score for each in steered])


async def test_text_and_logprobs_are_those_of_the_tokens() -> None:
    async with Engine(EngineConfig(dtype="float32", threads=1)) as engine:
        prompt = await engine.tokenize([{"role": "user", "content": "Write a short story about Mira."}])
        params = SamplingParams(max_tokens=12, logprobs=0, stop_token_ids=[46])
        found = await engine.beam(prompt, 3, params, n=2)
        assert len(found) == 2
        for each in found:
            result, told = each.result, each.result.logprobs
            stopped = result.finish_reason == "stop"
            assert result.text == await engine.detokenize(result.token_ids[: len(result.token_ids) - stopped])
            assert told is not None
            assert [one.token_id for one in told] == result.token_ids
            assert sum(one.logprob for one in told) / len(told) == pytest.approx(each.score, rel=1e-4)
            scored = await engine.generate(
                [*prompt, *result.token_ids], SamplingParams(max_tokens=0, prompt_logprobs=0)
            )
            known = (scored.prompt_logprobs or [])[len(prompt) :]
            assert [one.logprob for one in known if one] == pytest.approx(
                [one.logprob for one in told], abs=1e-3
            )


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"width": 0}, "width"),
        ({"width": 129}, "width"),
        ({"width": 2, "n": 3}, "n"),
        ({"width": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"width": 2, "length_penalty": 400}, "length_penalty"),
        ({"width": 2, "early_stopping": "always"}, "early_stopping"),
        ({"width": 2, "params": SamplingParams(max_tokens=0)}, "max_tokens"),
        ({"width": 2, "params": SamplingParams(logprobs=1)}, "logprobs"),
        ({"width": 2, "params": SamplingParams(stop="x")}, "stop"),
        ({"width": 2, "budget": TokenBudget(9)}, "budget"),
        ({"width": 2, "params": SamplingParams(repetition_penalty=1.5)}, "repetition_penalty"),
        ({"width": 2, "params": SamplingParams(allowed_token_ids=[1])}, "allowed_token_ids"),
    ],
)
async def test_what_beams_cannot_have_is_refused(
    make_engine: MakeEngine, arguments: dict[str, Any], field: str
) -> None:
    async with make_engine() as engine:
        with pytest.raises(InvalidRequest) as refused:
            await engine.beam([1, 2], **arguments)
        assert refused.value.field == field
        assert engine.stats().running == 0


@pytest.mark.parametrize("several", [False, True])
async def test_beams_that_begin_go_before_what_waits_behind_their_search(
    make_engine: MakeEngine, several: bool
) -> None:
    ended: list[str] = []

    async def ask(name: str, stream: Any) -> None:
        await stream
        ended.append(name)

    async with (
        Dispatcher(toys(1, max_running_requests=1))
        if several
        else make_engine(max_running_requests=1) as engine
    ):
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        first = engine.generate([1, 2], params)
        await anext(first)
        waiting = engine.generate([3, 4], params)
        await waiting.accepted()
        fork, beside = first.fork(1, at=1)[0], first.fork_beside(1, [])
        named = {"first": first, "waiting": waiting, "fork": fork, "beside": beside}
        async with asyncio.TaskGroup() as group:
            for each in named.items():
                group.create_task(ask(*each))
    assert ended == ["first", "beside", "waiting", "fork"]


async def test_a_processor_that_forces_tokens_ends_the_search(make_engine: MakeEngine) -> None:
    def force(ids: Any, logits: Any) -> list[int]:
        return [7]

    async with make_engine() as engine:
        for most in (3, 20):
            with pytest.raises((ProcessorFailed, RuntimeError)):
                await engine.beam([1, 2], 2, SamplingParams(max_tokens=most, logits_processors=[force]))
        await freed(engine)


@pytest.mark.parametrize("steps", [0, 1, 5])
async def test_a_search_that_is_cancelled_ends_its_streams(make_engine: MakeEngine, steps: int) -> None:
    reached = asyncio.Event()

    async def look(ids: Any, logits: Any) -> None:
        if len(ids) >= 2 + steps:
            reached.set()

    async with make_engine() as engine:
        params = SamplingParams(max_tokens=40, logits_processors=[look])
        search = asyncio.create_task(engine.beam([1, 2], 4, params))
        await reached.wait()
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search
        await freed(engine)
        assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("several", [False, True])
async def test_a_search_ends_before_the_engine_that_closes(make_engine: MakeEngine, several: bool) -> None:
    reached = asyncio.Event()

    async def look(ids: Any, logits: Any) -> None:
        if len(ids) == 4:
            reached.set()

    params = SamplingParams(max_tokens=20, logits_processors=[look])
    async with Dispatcher(toys(1)) if several else make_engine() as engine:
        expected = await engine.beam([1, 2], 4, params)
        reached.clear()
        search = asyncio.create_task(engine.beam([1, 2], 4, params))
        await reached.wait()
    found = await search
    assert [each.result.token_ids for each in found] == [each.result.token_ids for each in expected]


async def test_a_search_ends_with_a_beam_that_fails(make_engine: MakeEngine) -> None:
    def fail(ids: Any, logits: Any) -> None:
        if len(ids) == 5:
            raise ZeroDivisionError

    async with make_engine() as engine:
        with pytest.raises(ProcessorFailed) as failed:
            await engine.beam([1, 2], 3, SamplingParams(max_tokens=9, logits_processors=[fail]))
        assert isinstance(failed.value.__cause__, ZeroDivisionError)
        await freed(engine)


@pytest.mark.parametrize("value", [np.nan, np.inf])
async def test_logits_that_are_no_numbers_end_the_search(make_engine: MakeEngine, value: float) -> None:
    def spoil(ids: Any, logits: Any) -> None:
        if len(ids) == 4:
            logits[7] = value

    async with make_engine() as engine:
        with pytest.raises(ProcessorFailed):
            await engine.beam([1, 2], 3, SamplingParams(max_tokens=9, logits_processors=[spoil]))
        await freed(engine)


async def test_a_search_without_any_way_fails_as_a_request_does(make_engine: MakeEngine) -> None:
    def ban(ids: Any, logits: Any) -> None:
        logits[:] = -np.inf

    async with make_engine() as engine:
        params = SamplingParams(max_tokens=9, logits_processors=[ban])
        for search in (engine.generate([1, 2], params), engine.beam([1, 2], 3, params)):
            with pytest.raises(ProcessorFailed, match="no finite maximum"):
                await search
        await freed(engine)


# -- best of --------------------------------------------------------------------------------------------


async def test_the_best_of_several_is_first(make_engine: MakeEngine) -> None:
    params = SamplingParams(seed=3, max_tokens=6)

    async def last(result: Result) -> float:
        await asyncio.sleep(0)
        return result.token_ids[-1]

    async with make_engine() as engine:
        usual = await asyncio.gather(*engine.choices([1, 2], params, n=5))
        found = await engine.best_of([1, 2], params, n=5, score=last)
        assert sorted([each.token_ids for each in usual]) == sorted([each.result.token_ids for each in found])
        scores = [each.result.token_ids[-1] for each in found]
        assert scores == [each.score for each in found] == sorted(scores, reverse=True)
        likely = await engine.best_of([1, 2], params, n=5)
        for each in likely:
            told = [one.logprob for one in each.result.logprobs or ()]
            assert each.score == pytest.approx(sum(told) / len(told))
        assert likely[0].score >= likely[-1].score


async def test_outputs_without_a_score_are_last(make_engine: MakeEngine) -> None:
    scores = [1.0, float("nan"), 3.0, float("nan"), 2.0]
    async with make_engine() as engine:
        found = await engine.best_of([1, 2], SamplingParams(max_tokens=2), n=5, score=lambda _: scores.pop())
    assert [each.score for each in found][:3] == [3.0, 2.0, 1.0]


async def test_the_prompt_is_computed_once(make_engine: MakeEngine) -> None:
    prompt = [each % 60 for each in range(80)]
    async with make_engine() as engine:  # with pages of 4 tokens
        await engine.best_of(prompt, SamplingParams(max_tokens=2), n=6)
        assert 80 <= engine.stats().prefill_tokens <= 80 + 6 * 4
        before = engine.stats().prefill_tokens
        await engine.beam([*prompt[::-1]], 6, SamplingParams(max_tokens=1))
        # The hypotheses are streams, too.
        assert engine.stats().prefill_tokens - before <= 80 + 6 * 4


async def test_a_score_that_fails_ends_the_other_outputs(make_engine: MakeEngine) -> None:
    def score(result: Result) -> float:
        if len(result.token_ids) == 1:
            raise ZeroDivisionError
        return 0.0

    async with make_engine() as engine:
        for fail in (score, fail_later):
            # An output of one token is there first.
            with pytest.raises(ZeroDivisionError):
                await engine.best_of([1, 2], SamplingParams(max_tokens=1), n=3, score=fail)
            await freed(engine)
        with pytest.raises(InvalidRequest):
            await engine.best_of([1, 2], n=0)


async def fail_later(result: Result) -> float:
    await asyncio.sleep(0)
    raise ZeroDivisionError


async def test_a_best_of_that_is_cancelled_ends_its_streams(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        search = asyncio.create_task(engine.best_of([1, 2], SamplingParams(max_tokens=50), n=4))
        while engine.stats().running < 4:
            await asyncio.sleep(0)
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search
        await freed(engine)
        assert asyncio.all_tasks() == {asyncio.current_task()}
