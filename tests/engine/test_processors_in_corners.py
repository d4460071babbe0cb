"""Logits processors where several things meet: stops, drafts, masks, and what processors do to themselves."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Sequence
from typing import Any, Self

import pytest

from aioinfer import EngineConfig, ProcessorFailed, SamplingParams, TokenBudget
from aioinfer.engine import Engine
from aioinfer.execution.device import StepOutOfMemory
from aioinfer.params import Grammar
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_logits_processors import PROMPT, Counting, asked, next_one, nothing, wanted
from tests.tiers import SECONDS, rest


async def write(ids: Any, logits: Any) -> list[int]:
    """Nothing is sampled, and 30 tokens come at once."""
    return [7] * 30


@pytest.mark.parametrize("stop", [{}, {"stop_regex": "[A-Z]{5}nothing"}])
@pytest.mark.parametrize("most", [24, 60])
async def test_tokens_written_by_a_coroutine_are_searched_for_stops(
    make_engine: MakeEngine, stop: dict[str, Any], most: int
) -> None:
    async with make_engine() as engine:
        result = await engine.generate(PROMPT, asked(write, max_tokens=most, **stop))
        await settle(engine)
    assert result.token_ids == [7] * most
    assert result.finish_reason == "length"


@pytest.mark.parametrize("tokens", [5, 30, 45])
@pytest.mark.parametrize("stop_regex", [(), ("[A-Z]{5}nothing",)])
async def test_tokens_written_by_a_coroutine_count_in_a_budget(
    make_engine: MakeEngine, tokens: int, stop_regex: Sequence[str]
) -> None:
    budget = TokenBudget(tokens)
    params = asked(write, max_tokens=60, stop_regex=stop_regex)
    async with make_engine() as engine:
        streams = [engine.generate(PROMPT, params, budget=budget) for _ in range(2)]
        results = await asyncio.gather(*streams)
        await settle(engine)
    assert sum(len(each.token_ids) for each in results) == tokens
    assert {each.finish_reason for each in results} == {"length"}
    assert budget.left == 0


async def test_nobody_changes_the_tokens_that_a_coroutine_is_shown(make_engine: MakeEngine) -> None:
    async def look(ids: Any, logits: Any) -> None:
        ids[0] = 3

    async with make_engine() as engine:
        with pytest.raises(ProcessorFailed):
            await engine.generate(PROMPT, asked(look))


class Drowsy:
    """Is idle for five tokens behind each call."""

    idle = 5

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, ids: Any, logits: Any) -> Any:
        self.seen.append(len(ids) - len(PROMPT))
        next_one(ids, logits)


class DrowsyLater(Drowsy):
    async def __call__(self, ids: Any, logits: Any) -> None:
        super().__call__(ids, logits)


@pytest.mark.parametrize("kind", [Drowsy, DrowsyLater])
async def test_one_that_is_idle_is_not_called(make_engine: MakeEngine, kind: type[Drowsy]) -> None:
    processor = kind()
    async with make_engine() as engine:
        result = await engine.generate(PROMPT, asked(processor))
    assert processor.seen == [5, 10, 15, 20]
    assert result.token_ids[:5] == wanted(asked())[:5]
    assert result.token_ids[:6] != wanted(asked())[:6]


async def test_an_empty_list_decides_nothing(make_engine: MakeEngine) -> None:
    def empty(ids: Any, logits: Any) -> list[int]:
        return []

    async def empty_later(ids: Any, logits: Any) -> list[int]:
        return []

    async with make_engine() as engine:
        for first in (empty, empty_later):
            assert (await engine.generate(PROMPT, asked(first, next_one))).token_ids == wanted(
                asked(next_one)
            )


class BatchedCounting(Counting):
    def copy(self) -> BatchedCounting:
        return BatchedCounting(self.count)

    def batch(self, ids: list[Any], logits: list[Any]) -> list[Any]:
        return [self(*each) for each in zip(ids, logits, strict=True)]


@pytest.mark.parametrize("speculation", ["off", "lookup"])
async def test_one_with_a_state_is_told_all_tokens_though_it_has_a_batch(
    make_engine: MakeEngine, speculation: str
) -> None:
    params = asked(BatchedCounting(), max_tokens=40)
    expected = wanted(params)
    async with make_engine(speculation=speculation, adaptive_drafts=False) as engine:
        result = await engine.generate(PROMPT, params.changed(prediction=tuple(expected)))
    assert result.token_ids == expected


class Spoilt(Counting):
    """Raises what it is told to, in one of its methods, the third time."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.calls = itertools.count()

    def _may_fail(self, where: str) -> None:
        if where == self.where and next(self.calls) == 3:
            raise KeyError(where)

    def __call__(self, ids: Any, logits: Any) -> None:
        self._may_fail("call")

    def accept(self, token: int) -> None:
        self._may_fail("accept")

    def copy(self) -> Self:  # type: ignore[override]
        self._may_fail("copy")
        return self

    @property
    def idle(self) -> int:
        self._may_fail("idle")
        return 0


@pytest.mark.parametrize("where", ["call", "accept", "idle", "idle is none"])
async def test_a_method_that_raises_ends_its_own_request(make_engine: MakeEngine, where: str) -> None:
    class Broken(Spoilt):
        idle = None if where == "idle is none" else Spoilt.idle  # type: ignore[assignment]

    async with make_engine() as engine:
        good = engine.generate(PROMPT, asked())
        with pytest.raises(ProcessorFailed):
            await engine.generate(PROMPT, asked(Broken(where)))
        assert (await good).token_ids == wanted(asked())
        await settle(engine)


async def test_a_copy_that_raises_ends_its_own_request(make_engine: MakeEngine) -> None:
    class Uncopied(Counting):
        made = 0

        def copy(self) -> Uncopied:
            Uncopied.made += 1
            if Uncopied.made > 1:
                raise KeyError("a bug")
            return Uncopied(self.count)

    failing = itertools.count()

    def out_of_memory(step: Any) -> None:
        if next(failing) == 4:
            raise StepOutOfMemory("no room")

    async with make_engine(fault=out_of_memory) as engine:
        bad = engine.generate(PROMPT, asked(Uncopied(), max_tokens=40))
        good = engine.generate(PROMPT, asked(max_tokens=40))
        with pytest.raises(ProcessorFailed):
            await bad
        assert (await good).token_ids == wanted(asked(max_tokens=40))
        await settle(engine)


@pytest.mark.parametrize("how", ["closes", "swallows", "raises"])
async def test_a_coroutine_may_end_its_own_request(make_engine: MakeEngine, how: str) -> None:
    unhandled: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    begun = asyncio.Event()

    async def look(ids: Any, logits: Any) -> None:
        begun.set()
        if how == "closes":
            stream.close()
            return
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if how == "raises":
                raise ValueError("no") from None

    async with make_engine() as engine:
        stream = engine.generate(PROMPT, asked(look))
        await begun.wait()
        stream.close()
        for _ in range(5):
            await asyncio.sleep(0)
        assert (await engine.generate(PROMPT, asked())).token_ids == wanted(asked())
        await settle(engine)
    gc.collect()
    assert unhandled == []


@pytest.mark.parametrize("later", [False, True])
async def test_allowed_tokens_hold_whatever_processors_do(later: bool) -> None:
    def against(ids: Any, logits: Any) -> None:
        logits[:] = 0.0
        logits[7] = 50.0

    async def against_later(ids: Any, logits: Any) -> None:
        against(ids, logits)

    params = SamplingParams(
        temperature=0,
        max_tokens=5,
        allowed_token_ids=range(60, 70),
        logits_processors=(against_later if later else against,),
        ignore_eos=True,
    )
    async with Engine(EngineConfig(dtype="float32", threads=1)) as engine:
        result = await engine.generate(PROMPT, params)
    assert set(result.token_ids) <= set(range(60, 70))


@rest(SECONDS)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("grammar", [None, Grammar("regex", "[a-z ]{60}")])
@pytest.mark.parametrize("what", ["nothing", "forces", "slow"])
@pytest.mark.parametrize("speculation", ["lookup", "tiny-chat"])
async def test_drafts_change_nothing_beside_processors(
    speculation: str, what: str, grammar: Any, penalty: float
) -> None:
    def spell(ids: Any, logits: Any) -> Sequence[int] | None:
        assert ids.min() >= 0
        return letters if len(ids) % 5 == 0 else None

    processor = spell if what == "forces" else nothing
    found = []
    for drafter in ("off", speculation):
        config = EngineConfig(
            dtype="float32",
            threads=1,
            speculation=drafter,
            adaptive_drafts=False,
            grammar_patience=1e-9 if what == "slow" and drafter != "off" else 10.0,
        )
        async with Engine(config) as engine:
            assert engine.tokenizer is not None
            letters = engine.tokenizer.encode_part("abc")[:2]
            params = SamplingParams(
                temperature=0,
                max_tokens=60,
                ignore_eos=grammar is None,
                logprobs=1,
                logits_processors=(processor,),
                grammar=grammar,
                repetition_penalty=penalty,
            )
            if found and speculation == "lookup":
                params = params.changed(prediction=tuple(found[0].token_ids))
            found.append(await engine.generate("ab ab ab ab ab ab", params))
            await settle(engine)
    assert found[0].token_ids == found[1].token_ids
    for one, other in zip(found[0].logprobs, found[1].logprobs, strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


async def test_coroutines_do_not_begin_before_they_are_known(make_engine: MakeEngine) -> None:
    """A loop's task factory may begin with a task at once, as that of eager tasks does."""
    names: list[str] = []

    async def write_one(ids: Any, logits: Any) -> list[int]:
        return [7]

    def factory(loop: Any, coroutine: Any, **rest: Any) -> asyncio.Task[Any]:
        names.append(coroutine.__qualname__)
        return asyncio.Task(coroutine, loop=loop, **rest)

    asyncio.get_running_loop().set_task_factory(factory)
    async with make_engine() as engine:
        assert (await engine.generate(PROMPT, asked(write_one))).token_ids == [7] * 24
    assert not [name for name in names if "Answers" in name]
