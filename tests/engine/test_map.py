"""``engine.map`` and ``engine.choices``: many results, in order, bounded, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import itertools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from aioinfer import EngineConfig, Result, SamplingParams, errors
from aioinfer.testing import Answer, FakeEngine
from tests.engine.conftest import MakeEngine
from tests.engine.test_chat import freed
from tests.tiers import SECONDS, rest

SMALL: Any = {"model": "fake", "num_pages": 256, "overlap_steps": 0, "max_running_requests": 8}


def echo(prompt: str) -> str:
    return f"<{prompt}>"


async def texts(results: Any) -> list[str]:
    return [each.text async for each in results]


# -- order and bounds ----------------------------------------------------------------------------------


@rest(SECONDS)
async def test_results_come_in_the_order_of_their_prompts() -> None:
    def uneven(prompt: str) -> Answer:
        return Answer(prompt, delay=0.02 if int(prompt) % 7 == 0 else 0.0)

    async with FakeEngine(uneven) as engine:
        prompts = [str(number) for number in range(60)]
        assert await texts(engine.map(prompts, concurrency=5)) == prompts
        assert await texts(engine.map(iter(prompts))) == prompts
        assert await texts(engine.map(())) == []

        async def source() -> AsyncIterator[str]:
            for prompt in prompts:
                await asyncio.sleep(0)
                yield prompt

        assert await texts(engine.map(source(), concurrency=3)) == prompts
        chats = [[{"role": "user", "content": "1"}]]
        engine.answers = echo
        assert await texts(engine.map(chats)) == ["<user: 1\nassistant: >"]


async def test_prompts_are_read_as_there_is_room() -> None:
    """An endless iterable, a head that takes long, and never more open or kept than promised."""
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        for read in itertools.count(1):
            yield "slow" if read == 1 else "x"

    answers = {"slow": Answer("s", delay=0.05), "": "x"}
    async with FakeEngine(answers) as engine:
        async with engine.map(endless(), concurrency=4) as results:
            assert read == 0
            most = 0
            for _ in range(20):
                await anext(results)
                stats = engine.stats()
                most = max(most, stats.running + stats.waiting + stats.arriving)
                # Delivered ones make room for as many.
                assert len(results._window) <= 8
            assert 1 <= most <= 4
        assert read <= 20 + 8 + 1
        await freed(engine)


async def test_one_bad_prompt_is_its_own_error() -> None:
    prompts: list[Any] = ["a", "x" * 100_000, "b", 7, "c"]
    async with FakeEngine({"b": errors.OutOfMemory("a step"), "": "fine"}) as engine:
        found = [each async for each in engine.map(prompts, on_error="return")]
        kinds = [type(each) for each in found]
        assert kinds == [Result, errors.InvalidRequest, errors.OutOfMemory, errors.InvalidRequest, Result]
        got = []
        with pytest.raises(errors.InvalidRequest):
            async for each in engine.map(prompts):
                got.append(each)
        assert [each.text for each in got] == ["fine"]
        await freed(engine)


async def test_a_lost_engine_ends_the_map_whatever_is_returned() -> None:
    async with FakeEngine("x" * 1000) as engine:
        results = engine.map(itertools.repeat("a"), concurrency=3, on_error="return")
        await anext(results)
        engine.lose_device()
        with pytest.raises(errors.EngineFailed):
            while True:
                await anext(results)
        with pytest.raises(StopAsyncIteration):
            await anext(results)


async def test_what_the_prompts_raise_comes_behind_the_results_before_it() -> None:
    def broken() -> Iterator[str]:
        yield "a"
        yield "b"
        raise KeyError("no more")

    async def broken_too() -> AsyncIterator[str]:
        for each in broken():
            yield each

    async with FakeEngine(echo) as engine:
        for source in (broken(), broken_too()):
            got = []
            with pytest.raises(KeyError, match="no more"):
                async for each in engine.map(source):
                    got.append(each.text)
            assert got == ["<a>", "<b>"]


async def test_progress_is_told_what_is_done_in_the_consumers_context() -> None:
    who = contextvars.ContextVar("who", default="nobody")
    seen: list[tuple[int, int | None, str]] = []

    def progress(done: int, total: int | None) -> None:
        seen.append((done, total, who.get()))

    async with FakeEngine(echo) as engine:
        who.set("the consumer")
        await texts(engine.map([str(n) for n in range(40)], progress=progress, concurrency=4))
        dones = [done for done, _, _ in seen]
        assert dones == sorted(set(dones))
        assert dones[-1] == 40
        assert {(total, name) for _, total, name in seen} == {(40, "the consumer")}
        await texts(engine.map(iter("ab"), progress=progress))
        assert seen[-1][:2] == (2, None)

        def broken(done: int, total: int | None) -> None:
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await texts(engine.map(["a"] * 9, progress=broken))
        await freed(engine)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("prompts", {"prompts": "one text"}),
        ("prompts", {"prompts": 7}),
        ("prompts", {"prompts": {"a": 1}}),
        ("concurrency", {"concurrency": 0}),
        ("concurrency", {"concurrency": 2.5}),
        ("on_error", {"on_error": "ignore"}),
        ("progress", {"progress": True}),
    ],
)
async def test_wrong_arguments_are_refused_at_once(field: str, arguments: Any) -> None:
    async with FakeEngine(echo) as engine:
        with pytest.raises(errors.InvalidRequest) as caught:
            engine.map(**{"prompts": ["a"], **arguments})
        assert caught.value.field == field
    with pytest.raises(errors.EngineClosed):
        engine.map(["a"])


# -- others ----------------------------------------------------------------------------------------------


async def test_a_full_queue_is_waited_for() -> None:
    config = EngineConfig(**{**SMALL, "max_running_requests": 1, "max_queued_requests": 2})
    async with FakeEngine(echo, config=config) as engine:
        prompts = [str(number) for number in range(30)]
        assert await texts(engine.map(prompts, concurrency=16)) == [echo(each) for each in prompts]


async def test_others_get_their_turns_between_the_prompts_of_a_map() -> None:
    config = EngineConfig(**{**SMALL, "max_running_requests": 1, "max_step_tokens": 64})
    async with FakeEngine(echo, config=config) as engine:
        order: list[str] = []

        async def job() -> None:
            async for each in engine.map([f"job {n}" for n in range(12)], concurrency=12):
                order.append(each.text)

        async def other() -> None:
            order.append((await engine.generate("other")).text)

        async with asyncio.TaskGroup() as group:
            group.create_task(job())
            await asyncio.sleep(0)
            group.create_task(other())
        assert order.index("<other>") < 4


# -- leaving -------------------------------------------------------------------------------------------


@rest(SECONDS)
async def test_leaving_a_map_aborts_what_is_open() -> None:
    async with FakeEngine(Answer("x" * 200, pace=0.01)) as engine:
        engine.answers = iter(["first", *(Answer("x", delay=60.0) for _ in range(40))])
        async for _ in engine.map(["a"] * 20, concurrency=4):
            break
        gc.collect()
        await freed(engine)

        async def consume() -> None:
            await texts(engine.map(["a"] * 20, concurrency=4))

        task = asyncio.create_task(consume())
        while not engine.stats().running:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await freed(engine)

        results = engine.map(["a"] * 20, concurrency=4)
        reading = asyncio.ensure_future(anext(results))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(results)
        reading.cancel()
        await asyncio.wait([reading])
        await results.aclose()
        await freed(engine)


@rest(SECONDS)
async def test_leaving_a_map_ends_the_reading_of_its_prompts() -> None:
    stopped = asyncio.Event()

    async def waiting() -> AsyncIterator[str]:
        yield "a"
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    async with FakeEngine(echo) as engine:
        async with engine.map(waiting()) as results:
            assert isinstance(first := await anext(results), Result)
            assert first.text == "<a>"  # although the next prompt is not there
            task = asyncio.ensure_future(anext(results))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])
        async with asyncio.timeout(60):
            await stopped.wait()
        stopped.clear()

        results = engine.map(waiting())
        await anext(results)
        del results
        gc.collect()
        async with asyncio.timeout(60):
            await stopped.wait()
        assert asyncio.all_tasks() == {asyncio.current_task()}


# -- choices -------------------------------------------------------------------------------------------


async def test_choices_share_a_prompt_and_differ_by_their_seeds(make_engine: MakeEngine) -> None:
    params = SamplingParams(seed=5, max_tokens=8, ignore_eos=True)
    async with make_engine() as engine:
        encoded = 0
        tokenizer: Any = engine.tokenizer
        encode = tokenizer.encode

        def counted(text: str) -> Any:
            nonlocal encoded
            encoded += 1
            return encode(text)

        tokenizer.encode = counted
        found = await asyncio.gather(*engine.choices("abcd", params, n=3))
        assert encoded == 1
        alone = [
            await engine.generate("abcd", SamplingParams(seed=5 + n, max_tokens=8, ignore_eos=True))
            for n in range(3)
        ]
        assert [each.token_ids for each in found] == [each.token_ids for each in alone]
        assert len({tuple(each.token_ids) for each in found}) == 3


async def test_either_all_choices_are_queued_or_none(make_engine: MakeEngine) -> None:
    async with make_engine(max_queued_requests=4) as engine:
        await engine.pause()
        with pytest.raises(errors.Rejected):
            engine.choices([1, 2], n=6)
        assert engine.stats().waiting == 0
        for n in (0, 129, True, "2"):
            with pytest.raises(errors.InvalidRequest, match=r"^n: "):
                engine.choices([1, 2], n=n)  # type: ignore[arg-type]
        first, second = engine.choices([1, 2], n=2)
        first.close()
        engine.resume()
        assert (await second).token_ids
