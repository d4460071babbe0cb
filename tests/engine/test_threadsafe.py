"""``engine.threadsafe()``: other threads and other loops, as bounded and as cancellable as the engine."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from typing import Any, TypeVar

import pytest

from aioinfer import EngineConfig, errors
from aioinfer.client.threadsafe import ThreadsafeEngine
from aioinfer.testing import Answer, FakeEngine
from tests.engine.test_chat import CALLING, USER, freed, weather
from tests.tiers import SECONDS, rest

_T = TypeVar("_T")


def echo(prompt: str) -> str:
    return f"<{prompt}>"


async def elsewhere(call: Callable[[], _T]) -> _T:
    async with asyncio.timeout(60):
        return await asyncio.to_thread(call)


async def test_other_threads_wait_iterate_and_take_futures() -> None:
    async with FakeEngine(echo) as engine:
        remote = engine.threadsafe()

        def work() -> list[str]:
            texts = [remote.generate("one").result()]
            texts_of = "".join(chunk.text for chunk in remote.generate("two"))
            futures = [remote.generate(str(number)).future() for number in range(20)]
            found = sorted((each.result().text for each in as_completed(futures)), key=len)
            assert {echo(str(number)) for number in range(20)} == set(found)
            with remote.generate("three", request_id="mine") as stream:
                assert "<three>".startswith(next(iter(stream)).text)
                assert stream.result(timeout=60).request_id == "mine"
            return [texts[0].text, texts_of]

        assert await elsewhere(work) == ["<one>", "<two>"]

        def many() -> list[str]:
            with ThreadPoolExecutor(8) as pool:
                return list(pool.map(lambda n: remote.generate(str(n)).result().text, range(64)))

        assert await elsewhere(many) == [echo(str(n)) for n in range(64)]


async def test_other_loops_use_it_as_their_own() -> None:
    async with FakeEngine(CALLING) as engine:
        remote = engine.threadsafe()

        async def chat() -> Any:
            result = await remote.chat(USER, tools=[weather])
            text = ""
            async with remote.chat(USER, tools=[weather]) as stream:
                async for delta in stream:
                    text += delta.content
            assert text == result.content
            with pytest.raises(errors.InvalidRequest) as refused:
                remote.chat(USER, tools=[7])  # type: ignore[list-item]
            assert refused.value.field == "tools[0]"
            return result

        result = await elsewhere(lambda: asyncio.run(chat()))
        assert result.tool_calls[0].parsed == {"city": "Rome", "days": 2}
        assert (await remote.chat(USER, tools=[weather])).content == "Let me look."  # and on the engine's own
        with pytest.raises(errors.WrongLoop, match="await it"):
            remote.generate("a").result()
        with pytest.raises(errors.WrongLoop):
            next(iter(remote.generate("a")))


@rest(SECONDS)
async def test_leaving_a_remote_stream_ends_its_request() -> None:
    async with FakeEngine(Answer("x", delay=600.0)) as engine:
        remote = engine.threadsafe()

        def timed_out() -> None:
            with remote.generate("a") as stream, pytest.raises(TimeoutError):
                stream.result(timeout=0.01)

        await elsewhere(timed_out)
        await freed(engine)

        async def cancelled() -> None:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await remote.generate("a")

        await elsewhere(lambda: asyncio.run(cancelled()))
        await freed(engine)

        def dropped() -> None:
            future = remote.generate("a").future()  # which keeps the stream
            gc.collect()
            with pytest.raises(TimeoutError):
                future.result(0.01)
            future.cancel()
            with pytest.raises(CancelledError):
                future.result(60)
            stream = remote.generate("a")
            del stream
            gc.collect()

        await elsewhere(dropped)
        await freed(engine)
        left = remote.generate("a")
        left.close()
        left.close()
        await freed(engine)


async def test_closing_the_engine_ends_the_waiting_of_other_threads() -> None:
    waiting: list[BaseException] = []
    engine = FakeEngine(Answer("x", delay=600.0))
    await engine.start()
    remote: ThreadsafeEngine = engine.threadsafe()

    def wait() -> None:
        try:
            remote.generate("a").result()
        except errors.AioInferError as error:
            waiting.append(error)

    threads = [threading.Thread(target=wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    while engine.stats().running < 4:
        await asyncio.sleep(0.001)
    await engine.aclose()
    await elsewhere(lambda: [thread.join() for thread in threads])
    assert [type(error) for error in waiting] == [errors.EngineClosed] * 4
    with pytest.raises(errors.EngineClosed):
        remote.generate("a")
    with pytest.raises(errors.EngineClosed):
        engine.threadsafe()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@rest(SECONDS)
async def test_a_stream_that_is_collected_on_the_engines_loop_leaves_a_turn_later() -> None:
    """The collector runs at any point, amid a step, too."""
    async with FakeEngine(Answer("x", delay=600.0)) as engine:
        stream = engine.threadsafe().generate("a")
        while engine.stats().running < 1:
            await asyncio.sleep(0)
        del stream
        gc.collect()
        assert engine.stats().running == 1
        await freed(engine)


@rest(SECONDS)
async def test_streams_that_are_collected_while_others_are_sent_do_no_harm() -> None:
    config = EngineConfig(model="fake", num_pages=64, max_queued_requests=1)
    async with FakeEngine("x", config=config) as engine:
        remote = engine.threadsafe()

        def refuse() -> None:
            stream = remote.generate("a")
            with remote._lock:  # as within a call that allocates, and is interrupted by the collector
                del stream
                gc.collect()

        await elsewhere(refuse)
        await freed(engine)


async def test_what_is_on_its_way_to_the_loop_is_bounded() -> None:
    config = EngineConfig(model="fake", num_pages=64, max_queued_requests=3, max_running_requests=2)
    async with FakeEngine("x", config=config) as engine:
        remote = engine.threadsafe()
        streams = [remote.generate("a") for _ in range(5)]  # this loop has not run meanwhile
        with pytest.raises(errors.Rejected, match="on their way"):
            remote.generate("a")
        assert [(await each).text for each in streams] == ["x"] * 5
        assert (await remote.generate("a")).text == "x"


def test_a_loop_that_is_gone_is_an_error() -> None:
    async def use() -> ThreadsafeEngine:
        engine = FakeEngine("x")
        await engine.start()
        return engine.threadsafe()

    remote = asyncio.run(use())
    with pytest.raises(errors.EngineClosed, match="loop"):
        remote.generate("a")
