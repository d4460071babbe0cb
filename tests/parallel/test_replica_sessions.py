"""Sessions of a dispatcher: held where their last turn was computed, and moved elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from aioinfer import EngineClosed, InvalidRequest, SamplingParams
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.parallel import Dispatcher, exchange
from tests.engine.simulation import settle
from tests.model.harness import require
from tests.parallel.framed import Kind, both
from tests.parallel.toys import ENDLESS, PARAMS, Toy, end, expected, prompt, toys, virtual
from tests.parallel.waiting import until
from tests.tiers import PROGRAM, SECONDS, rest

#: seconds in which replicas have told what they hold
TOLD = 0.5


def engines(count: int = 3, **settings: Any) -> list[Toy]:
    return toys(count, deterministic=True, **settings)


def held_pages(engine: Engine) -> int:
    return engine._started().core.scheduler.memory.held_pages


def prefilled(each: list[Toy]) -> list[int]:
    return [engine.stats().prefill_tokens for engine in each]


@both
@virtual
async def test_a_session_is_held_where_its_last_turn_was_computed(kind: Kind) -> None:
    each = engines()
    async with kind(each, policy="prefix") as dispatcher, dispatcher.session() as session:
        ids: list[int] = []
        for turn in range(4):
            more = prompt(turn, 40)
            result = await session.generate(more, PARAMS)
            ids += more
            assert result.token_ids == expected(ids, PARAMS)
            ids += result.token_ids
            await asyncio.sleep(TOLD)
            assert session.held_tokens == len(ids) - 4 == 4 * sum(map(held_pages, each))
        assert list(session.token_ids) == ids
        # Each turn computes its own tokens, and those of the last page that was not whole.
        assert sorted(prefilled(each)) == [0, 0, 40 + 3 * 44]
        assert dispatcher.stats().sessions == 1
        fork = session.fork()
        session.close()
        await asyncio.sleep(TOLD)
        assert fork.held_tokens == len(ids) - 4
        assert (await fork.generate(prompt(9, 8), PARAMS)).usage.cached_tokens == len(ids) - 4
        fork.close()
        await asyncio.sleep(TOLD)
        assert [held_pages(engine) for engine in each] == [0, 0, 0]
        assert not any(replica.held for replica in dispatcher._replicas)
        assert dispatcher.stats().sessions == 0


@both
@virtual
async def test_what_is_held_ends_with_its_time_and_with_the_dispatcher(kind: Kind) -> None:
    each = engines()
    dispatcher = kind(each, policy="prefix")
    async with dispatcher:
        session, other = dispatcher.session(ttl=5.0), dispatcher.session()
        await session.generate(prompt(1, 40), PARAMS)
        await other.generate(prompt(2, 40), PARAMS)
        await asyncio.sleep(4.5)
        assert session.held_tokens > 0
        await asyncio.sleep(2 * TOLD)
        assert session.held_tokens == 0
        assert other.held_tokens > 0
        assert (await session.generate(prompt(3, 8), PARAMS)).finish_reason == "length"
    assert other.closed
    assert session.held_tokens == other.held_tokens == 0
    with pytest.raises(EngineClosed):
        other.generate(prompt(4, 8), PARAMS)


@both
@virtual
async def test_a_session_outlives_the_replica_that_holds_it(kind: Kind) -> None:
    each = engines(2)
    async with kind(each, policy="prefix") as dispatcher, dispatcher.session() as session:
        dispatcher._started().when_lost = None
        first = await session.generate(prompt(1, 40), PARAMS)
        await asyncio.sleep(TOLD)
        assert session.held_tokens == 44
        (home,) = [engine for engine in each if held_pages(engine)]
        home.lose()
        await asyncio.sleep(TOLD)
        assert session.held_tokens == 0
        second = await session.generate(prompt(2, 8), PARAMS)
        ids = [*prompt(1, 40), *first.token_ids, *prompt(2, 8)]
        assert second.token_ids == expected(ids, PARAMS)
        await asyncio.sleep(TOLD)
        assert session.held_tokens == len(ids) + 8 - 4


@both
@virtual
async def test_a_session_moves_with_its_pages(kind: Kind) -> None:
    each = engines()
    async with kind(each, policy="prefix") as dispatcher, dispatcher.session() as session:
        ids = prompt(1, 200)
        ids += (await session.generate(ids, PARAMS)).token_ids
        await asyncio.sleep(TOLD)
        source = next(number for number, engine in enumerate(each) if held_pages(engine))
        assert dispatcher._exchange is None, "it costs nothing before"
        for step in (1, 2, 3):  # around, and home again
            target = (source + step) % 3
            before = prefilled(each)
            assert await session.move(f"local-{target}") == len(ids) - len(ids) % 4
            await asyncio.sleep(TOLD)
            assert [number for number, engine in enumerate(each) if held_pages(engine)] == [target]
            # What was computed there are the tokens that no whole page had, at most.
            assert prefilled(each)[target] - before[target] <= 8
            more = prompt(step, 6)
            result = await session.generate(more, PARAMS)
            ids += more
            assert result.token_ids == expected(ids, PARAMS)
            ids += result.token_ids
            await asyncio.sleep(TOLD)
            assert [number for number, engine in enumerate(each) if held_pages(engine)] == [target]
        for engine in each:
            await settle(engine) if not held_pages(engine) else None


@both
@virtual
async def test_a_session_moves_without_pages_where_there_are_none(
    kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are computed there."""
    each = engines(2)
    async with kind(each, policy="prefix") as dispatcher, dispatcher.session() as session:
        ids = prompt(1, 40)
        ids += (await session.generate(ids, PARAMS)).token_ids
        await asyncio.sleep(TOLD)
        target = next(number for number, engine in enumerate(each) if not held_pages(engine))
        dispatcher.flush_cache()
        assert await session.move(f"local-{target}") == 48
        assert prefilled(each)[target] == 48


@both
@virtual
async def test_a_session_moves_to_replicas_that_are_there(kind: Kind) -> None:
    async with kind(engines(2), policy="prefix") as dispatcher, dispatcher.session() as session:
        assert await session.move("local-1") == 0  # there is nothing yet
        await session.generate(prompt(1, 40), PARAMS)
        with pytest.raises(InvalidRequest, match="replica: there is none named 'local-7'"):
            await session.move("local-7")
        dispatcher._started().when_lost = None
        dispatcher._started().lost(dispatcher._replicas[1], RuntimeError("it is gone"))
        with pytest.raises(InvalidRequest, match="replica: there is none named 'local-1'"):
            await session.move("local-1")
        stream = session.generate(prompt(2, 8), ENDLESS)
        with pytest.raises(InvalidRequest, match="session: has a turn under way"):
            await session.move("local-0")
        await end([stream])
    async with Toy() as engine, engine.session() as session:
        with pytest.raises(InvalidRequest, match="replica: this is one engine"):
            await session.move("local-0")


@both
@virtual
async def test_a_session_that_is_closed_amid_its_move_leaves_nothing_held(kind: Kind) -> None:
    each = engines(2)
    async with kind(each, policy="prefix") as dispatcher:
        for wait in (0.0, 0.005, 0.02):
            session = dispatcher.session()
            await session.generate(prompt(1, 200), PARAMS)
            await asyncio.sleep(TOLD)
            target = next(number for number, engine in enumerate(each) if not held_pages(engine))
            moving = asyncio.ensure_future(session.move(f"local-{target}"))
            await asyncio.sleep(wait)
            session.close()
            await moving
            left = dispatcher.session()
            await left.generate(prompt(1, 200), PARAMS)
            moving = asyncio.ensure_future(left.move(f"local-{target}"))
            await asyncio.sleep(wait)
            moving.cancel()
            await asyncio.wait([moving])
            left.close()
            await asyncio.sleep(TOLD)
            assert [held_pages(engine) for engine in each] == [0, 0]
            assert not any(replica.held for replica in dispatcher._replicas)
            dispatcher.flush_cache()


@both
@virtual
async def test_a_turn_goes_where_its_history_is_and_not_where_prompts_are_computed(kind: Kind) -> None:
    each = engines(2)
    async with (
        kind(each, policy="prefix", roles=["prefill", "decode"], prefill_tokens=32) as dispatcher,
        dispatcher.session() as session,
    ):
        ids = prompt(1, 400)
        ids += (await session.generate(ids, PARAMS)).token_ids
        await asyncio.sleep(TOLD)
        assert [held_pages(engine) > 0 for engine in each] == [False, True]
        each[0].flush_cache()
        dispatcher._replicas[0].flush_cache()
        before = prefilled(each)
        result = await session.generate(prompt(2, 40), PARAMS)
        assert result.token_ids == expected(ids + prompt(2, 40), PARAMS)
        assert [now - then for now, then in zip(prefilled(each), before, strict=True)] == [0, 44]


@both
@virtual
async def test_a_prefix_that_is_warmed_is_held_in_one_replica(kind: Kind) -> None:
    each = engines(2)
    async with kind(each, policy="prefix") as dispatcher:
        ids = prompt(1, 64)
        async with await dispatcher.warm(ids) as warmed:
            await asyncio.sleep(TOLD)
            assert warmed.held_tokens == 64
            result = await dispatcher.generate(ids + prompt(2, 8), PARAMS)
            assert result.usage.cached_tokens == 64
        await asyncio.sleep(TOLD)
        assert [held_pages(engine) for engine in each] == [0, 0]


@rest(SECONDS)
async def test_a_session_is_saved_by_a_dispatcher_and_loaded_by_another_one(tmp_path: Path) -> None:
    require("native")
    config = EngineConfig(model="tiny-chat", threads=1, kv_memory_gib=0.1, deterministic=True)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    ids = [20 + number * 7 % 200 for number in range(300)]
    async with Dispatcher([Engine(config), Engine(config)]) as dispatcher, dispatcher.session() as session:
        await session.generate(ids, params)
        assert await session.save(tmp_path / "session") >= 304
        wanted = await session.generate("and", params)
    async with Dispatcher([Engine(config), Engine(config)]) as dispatcher:
        session = await dispatcher.load_session(tmp_path / "session")
        assert session.held_tokens >= 304
        found = await session.generate("and", params)
        assert (found.token_ids, found.text) == (wanted.token_ids, wanted.text)
        assert found.usage.cached_tokens >= 304


@pytest.mark.native
@pytest.mark.usefixtures("patient")
@rest(PROGRAM)
async def test_a_session_moves_between_processes(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_SHARED_MEMORY", directory)
    config = EngineConfig(model="tiny-chat", threads=1, kv_memory_gib=0.1, deterministic=True)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0)
    ids = [20 + number * 7 % 200 for number in range(600)]
    async with Dispatcher([Engine(config)]) as plain, plain.session() as session:
        wanted = [await session.generate(each, params) for each in (ids, "and", "then")]
    async with Dispatcher(processes=2, config=config) as dispatcher, dispatcher.session() as session:
        found = [await session.generate(ids, params)]
        await until(lambda: session.held_tokens > 0)
        for replica, text in (("process-0", "and"), ("process-1", "then")):
            assert await session.move(replica) >= 608
            found.append(await session.generate(text, params))
        assert [each.token_ids for each in found] == [each.token_ids for each in wanted]
        assert found[2].usage.cached_tokens >= 608
