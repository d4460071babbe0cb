"""Budgets of tokens: exact to the token, whatever ends the requests that share them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from aioinfer import InvalidRequest, Result, SamplingParams, TokenBudget
from aioinfer.engine import Engine
from aioinfer.parallel import Dispatcher
from aioinfer.pooling import Pooling
from tests.engine.conftest import MakeEngine
from tests.parallel.toys import ENDLESS, Toy, expected, prompt, toys, virtual
from tests.tiers import grid


async def shared(engine: Engine, budget: TokenBudget, params: list[SamplingParams]) -> list[Result]:
    streams = [engine.generate(prompt(seed), each, budget=budget) for seed, each in enumerate(params)]
    return await asyncio.gather(*streams)


def left_over(engine: Engine) -> bool:
    """The scheduler still counts requests."""
    assert engine._runtime is not None
    return bool(engine._runtime.core.scheduler.queues.sharing)


@pytest.mark.parametrize("speculation", ["off", "lookup"])
@pytest.mark.parametrize("tokens", grid([1, 37], [4, 5, 6, 8, 100]))
async def test_streams_that_share_a_budget_have_its_tokens_to_the_last(
    make_engine: MakeEngine, tokens: int, speculation: str
) -> None:
    async with make_engine(num_pages=400, speculation=speculation) as engine:
        budget = TokenBudget(tokens)
        async with asyncio.TaskGroup() as group:
            params = [ENDLESS] * 12  # more than run at a time
            task = group.create_task(shared(engine, budget, params))
        results = task.result()
        assert sum(len(each.token_ids) for each in results) == tokens
        assert sum(each.usage.completion_tokens for each in results) == tokens
        assert budget.left == 0
        assert {each.finish_reason for each in results} == {"length"}
        for seed, each in enumerate(results):
            wanted = expected(prompt(seed), ENDLESS.changed(max_tokens=max(1, len(each.token_ids))))
            assert each.token_ids == wanted[: len(each.token_ids)]
        again = await engine.generate(prompt(3), ENDLESS, budget=budget)
        assert (again.token_ids, again.text, again.finish_reason) == ([], "", "length")
        assert not left_over(engine)


@virtual
async def test_tokens_count_in_the_order_of_the_rows_and_stops_give_back_what_they_drop() -> None:
    dice = random.Random(4)
    for _ in range(30):
        budget = TokenBudget(dice.randint(1, 60))
        async with Toy(max_running_requests=3, overlap_steps=dice.choice([0, 1, 2])) as engine:
            params = [
                SamplingParams(
                    max_tokens=dice.choice([2, 10, 30]),
                    temperature=0,
                    ignore_eos=True,
                    stop_regex=dice.choice([(), ("[a-e]",), ("[0-9]",)]),
                )
                for _ in range(5)
            ]
            tokens, results = budget.left, await shared(engine, budget, params)
            used = sum(each.usage.completion_tokens for each in results)
            assert used + budget.left == tokens
            assert budget.left >= 0
            free = [await engine.generate(prompt(seed), each) for seed, each in enumerate(params)]
            for one, other in zip(results, free, strict=True):
                assert other.token_ids[: len(one.token_ids)] == one.token_ids
                if one.token_ids == other.token_ids:
                    continue
                assert (one.finish_reason, one.stop_reason) == ("length", None)
            assert not left_over(engine)


@virtual
async def test_a_token_that_is_dropped_stops_nothing() -> None:
    params = SamplingParams(max_tokens=50, temperature=0, ignore_eos=True)
    ids = expected(prompt(0), params)
    at = next(at for at, token in enumerate(ids) if at > 3 and token not in ids[:at])
    stopped = params.changed(stop_token_ids=[ids[at]])
    async with Toy() as engine:
        whole = await engine.generate(prompt(0), stopped, budget=TokenBudget(at + 1))
        assert (whole.finish_reason, whole.stop_reason) == ("stop", ids[at])
        cut = await engine.generate(prompt(0), stopped, budget=TokenBudget(at))
        assert (cut.finish_reason, cut.stop_reason, cut.token_ids) == ("length", None, ids[:at])


@virtual
async def test_a_budget_may_be_raised_and_what_left_is_forgotten() -> None:
    async with Toy(max_running_requests=2) as engine:
        budget = TokenBudget(10)
        stream = engine.generate(prompt(0), ENDLESS, budget=budget)
        async for chunk in stream:
            if len(stream.cell.output.token_ids) == 5:
                budget.left += 7
            assert chunk.token_ids
        assert len((await stream).token_ids) == 17
        left = engine.generate(prompt(1), ENDLESS, budget=budget)
        left.close()
        await engine.generate(prompt(2), ENDLESS.changed(max_tokens=3))
        assert not left_over(engine)


@pytest.mark.parametrize("count", [1, 3])
async def test_tokens_that_a_coroutine_forces_count(make_engine: MakeEngine, count: int) -> None:
    async def force(ids: Any, logits: Any) -> list[int]:
        return [7] * count

    async with make_engine(num_pages=400) as engine:
        budget, forced = TokenBudget(5), ENDLESS.changed(logits_processors=[force], logprobs=0)
        results = await shared(engine, budget, [forced, forced, ENDLESS])
        assert sum(len(each.token_ids) for each in results) == 5
        assert budget.left == 0
        for each in results:
            assert each.finish_reason == "length"
            assert each.text == await engine.detokenize(each.token_ids)
        assert all(len(each.logprobs or ()) == len(each.token_ids) for each in results[:2])
        assert not left_over(engine)


@virtual
async def test_a_budget_that_is_lowered_takes_nothing_back() -> None:
    async with Toy() as engine:
        budget, ids = TokenBudget(100), []
        stream = engine.generate(prompt(0), ENDLESS, budget=budget)
        async for chunk in stream:
            ids += chunk.token_ids
            if len(ids) == 20:
                budget.left = -10
        assert (await stream).token_ids == ids


@virtual
async def test_requests_that_leave_before_any_step_are_forgotten() -> None:
    async with Toy() as engine:
        await engine.pause()
        streams = [engine.generate(prompt(0), ENDLESS, budget=TokenBudget(5)) for _ in range(9)]
        assert left_over(engine)
        for stream in streams:
            stream.close()
        assert not left_over(engine)


@virtual
async def test_forks_share_the_budget_of_their_parent() -> None:
    async with Toy() as engine:
        budget = TokenBudget(60)
        stream = engine.generate(prompt(0), ENDLESS, budget=budget)
        async for _ in stream:
            if len(stream.result().token_ids) > 9:
                break
        others = stream.fork(2)
        own = stream.fork(budget=TokenBudget(7))[0]
        free = stream.fork(budget=None, params=ENDLESS.changed(max_tokens=100))[0]
        results = [stream, *others]
        new = [len(each.token_ids) - each.resumed for each in await asyncio.gather(*results)]
        assert (sum(new), budget.left) == (60, 0)
        one = await own
        assert len(one.token_ids) - one.resumed == 7
        assert len((await free).token_ids) == 100


@pytest.mark.parametrize("tokens", grid([12], [100]))
@pytest.mark.parametrize("stop", grid([()], [("g",)]))
async def test_what_coroutines_force_is_counted(
    make_engine: MakeEngine, tokens: int, stop: tuple[str, ...]
) -> None:
    async def force(ids: Any, logits: Any) -> list[int]:
        await asyncio.sleep(0)
        return [5, 6, 7, 8]

    params = ENDLESS.changed(max_tokens=18, stop=stop, logits_processors=[force])
    async with make_engine() as engine:
        budget = TokenBudget(tokens)
        streams = [
            engine.generate(prompt(seed), each, budget=budget)
            for seed, each in enumerate([ENDLESS.changed(max_tokens=40), params])
        ]
        used = sum(len(each.token_ids) for each in await asyncio.gather(*streams))
        assert used + budget.left == tokens
        assert budget.left >= 0
        assert not left_over(engine)


@virtual
async def test_a_restored_stream_goes_on_with_its_budget() -> None:
    async with Toy() as engine:
        budget = TokenBudget(20)
        stream = engine.generate(prompt(0), ENDLESS, budget=budget)
        async for _ in stream:
            if len(stream.cell.output.token_ids) >= 8:
                break
        checkpoint = stream.checkpoint()
        with pytest.raises(InvalidRequest, match="budget: is an object of this process"):
            checkpoint.to_json()
        stream.close()
        known = len(checkpoint.token_ids)
        assert budget.left <= 20 - known
        budget.left = 5
        result = await engine.restore(checkpoint)
        assert (len(result.token_ids), budget.left) == (known + 5, 0)


async def test_what_no_budget_can_be_is_refused_by_name(make_engine: MakeEngine) -> None:
    bad: Any
    for bad in (0, -1, 1.5, True, "3"):
        with pytest.raises(InvalidRequest, match="budget: must be a positive number of tokens"):
            TokenBudget(bad)
    async with make_engine() as engine:
        bad = 5
        with pytest.raises(InvalidRequest, match="budget: must be a TokenBudget"):
            engine.generate([1], budget=bad)
        with pytest.raises(InvalidRequest, match="budget: has no effect"):
            engine.generate([1], pooling=Pooling("mean"), budget=TokenBudget(5))
    assert repr(TokenBudget(5)) == "<TokenBudget 5 left>"


@virtual
async def test_beams_refuse_a_budget() -> None:
    async with Toy() as engine:
        with pytest.raises(InvalidRequest, match="budget: beams go on together"):
            await engine.beam(prompt(0), 2, SamplingParams(max_tokens=5), budget=TokenBudget(5))


@virtual
async def test_a_dispatcher_refuses_budgets() -> None:
    async with Dispatcher(toys(2)) as dispatcher:
        with pytest.raises(InvalidRequest, match="budget: is counted in one engine"):
            dispatcher.generate(prompt(0), ENDLESS, budget=TokenBudget(5))
