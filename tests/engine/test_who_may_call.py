"""Who may call: threads share an LLM's steps, programs without a loop have an engine in a thread, and the
copy of an engine in a child of a fork says so."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from aioinfer import Engine, EngineConfig, errors
from aioinfer.client.in_thread import EngineInThread
from aioinfer.llm import LLM
from aioinfer.parallel import Dispatcher
from aioinfer.params import SamplingParams
from aioinfer.scheduling.audit import check_idle
from aioinfer.testing import Answer, FakeEngine
from bench.threads import wrong_sums
from tests.engine.conftest import MakeEngine, OwnThreads
from tests.engine.making import make_llm
from tests.tiers import RACES, SECONDS, nightly, rest
from tests.toys import toy_generate

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG = SHORT.changed(max_tokens=40)


def together(count: int, work: Callable[[int], Any]) -> list[Any]:
    """The results of ``work(0)`` to ``work(count - 1)`` on as many threads, which begin at the same time."""
    begin = threading.Barrier(count)

    def at_once(number: int) -> Any:
        begin.wait(60)
        return work(number)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(at_once, range(count)))


# -- LLM ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 8])
def test_whole_answers_on_several_threads_are_their_own(count: int) -> None:
    with make_llm() as llm:

        def ask(number: int) -> bool:
            prompts = [[number + 1, other + 1] for other in range(10)]
            found = [llm.generate(prompt, SHORT, progress=False)[0].token_ids for prompt in prompts]
            return found == [toy_generate(prompt, SHORT) for prompt in prompts]

        assert together(count, ask) == [True] * count
        check_idle(llm._core.scheduler)
        assert llm.stats().paused


def test_the_calls_of_several_threads_share_steps() -> None:
    prompts = [[number, 2] for number in range(1, 5)]
    with make_llm() as llm:
        for prompt in prompts:
            llm.generate(prompt, LONG, progress=False)
        alone = llm._core.scheduler.queues.last_step
        together(4, lambda number: llm.generate(prompts[number], LONG, progress=False))
        assert llm._core.scheduler.queues.last_step - alone < alone


def test_steps_of_several_threads_return_each_result_once() -> None:
    with make_llm() as llm:

        def work(number: int) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
            asked, found = {}, {}
            for other in range(6):
                prompt = [number + 1, other + 1, 3]
                asked[llm.add_request(prompt, SHORT)] = toy_generate(prompt, SHORT)
                llm.take_chunks()
                found |= {key: result.token_ids for key, result in llm.step().items()}
            while llm.has_unfinished():
                found |= {key: result.token_ids for key, result in llm.step().items()}
            return asked, found

        asked, found = {}, {}
        for mine, returned in together(6, work):
            assert not found.keys() & returned.keys()
            asked |= mine
            found |= returned
        assert found == asked
        check_idle(llm._core.scheduler)


def test_a_step_that_waited_for_a_pause_waits_for_the_next_one_too() -> None:
    with make_llm() as llm:

        async def work() -> None:
            assert llm._engine._runtime is not None
            driver = llm._engine._runtime.driver
            await llm._queued([1, 4], LONG, None, {})
            await driver.step()
            assert driver.steps_in_flight
            waiting = [asyncio.create_task(driver.pause()), asyncio.create_task(driver.step())]
            driver._turns = 8  # it leaves the loop as many turns before it goes on
            await asyncio.sleep(0)  # both have begun
            driver.resume()
            await driver.pause()
            await asyncio.gather(*waiting)

        llm._run(work())


def test_steps_streams_and_whole_answers_on_several_threads_do_not_stop_each_other() -> None:
    with make_llm() as llm:

        def by_steps() -> list[list[int]]:
            keys = [llm.add_request([number, 4], LONG) for number in range(1, 4)]
            found: dict[int, list[int]] = {}
            while not {*keys} <= found.keys():
                found |= {key: result.token_ids for key, result in llm.step().items()}
            return [found[key] for key in keys]

        def streamed() -> list[list[int]]:
            streams = [llm.stream([number, 4], LONG) for number in range(1, 4)]
            return [[token for chunk in stream for token in chunk.token_ids] for stream in streams]

        def whole() -> list[list[int]]:
            prompts = [[number, 4] for number in range(1, 4)]
            return [result.token_ids for result in llm.generate(prompts, LONG, progress=False)]

        def aborting() -> list[list[int]]:
            for number in range(1, 9):
                llm.abort(llm.add_request([number, 5], LONG))
            return right

        right = [toy_generate([number, 4], LONG) for number in range(1, 4)]
        works = [by_steps, streamed, whole, streamed, whole, aborting]
        assert together(len(works), lambda number: works[number]()) == [right] * len(works)


def test_closing_ends_the_calls_of_other_threads() -> None:
    begun, go_on = threading.Semaphore(0), threading.Event()

    def fault(step: Any) -> None:
        begun.release()
        go_on.wait(60)

    llm = make_llm(fault=fault)
    refused: list[type[BaseException]] = []

    def ask() -> None:
        try:
            llm.generate([1, 2, 3], LONG, progress=False)
        except errors.AioInferError as error:
            refused.append(type(error))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    begun.acquire()
    closing = threading.Thread(target=llm.close)
    closing.start()
    while llm._home.open:
        pass
    go_on.set()
    for thread in [*threads, closing]:
        thread.join(60)
        assert not thread.is_alive()
    assert refused == [errors.EngineClosed] * 4


@rest(SECONDS)
@pytest.mark.parametrize("count", [2, 8, 32])
def test_sums_on_several_threads_are_right(count: int) -> None:
    with LLM(EngineConfig(threads=1)) as llm:
        assert wrong_sums(llm, count, 96 // count) == []


@nightly(RACES)
def test_thousands_of_sums_on_many_threads_are_right() -> None:
    with LLM(EngineConfig(threads=1)) as llm:
        assert wrong_sums(llm, 32, 100) == []


# -- an engine in a thread ------------------------------------------------------------------------


def test_a_program_without_a_loop_has_an_engine_in_a_thread(own_threads: OwnThreads) -> None:
    with FakeEngine.in_thread(lambda prompt: f"<{prompt}>") as engine:
        assert engine.generate("one").result().text == "<one>"
        assert "".join(chunk.text for chunk in engine.generate("two")) == "<two>"
        texts = together(8, lambda number: engine.generate(str(number)).result(60).text)
        assert texts == [f"<{number}>" for number in range(8)]
        assert engine.chat([{"role": "user", "content": "hi"}]).result().content.startswith("<user: hi")
        assert len(engine.embed(["a", "b"]).result()) == 2
        assert engine.engine.stats().finished > 10
        assert engine.engine.info.vocab_size
    assert own_threads() == []
    with pytest.raises(errors.EngineClosed):
        engine.generate("three")
    engine.close()


def test_leaving_its_block_waits_for_what_runs_and_closing_does_not() -> None:
    with FakeEngine.in_thread(Answer("slow", delay=0.05)) as engine:
        future = engine.generate("a").future()
        while not engine.engine.stats().running:
            pass
    assert future.result(0).text == "slow"
    engine = FakeEngine.in_thread(Answer("never", delay=600.0))
    stream = engine.generate("a")
    future = stream.future()
    while not engine.engine.stats().running:
        pass
    engine.close()
    with pytest.raises(errors.EngineClosed):
        future.result(60)


def test_one_that_is_dropped_or_does_not_start_leaves_no_thread(own_threads: OwnThreads) -> None:
    text = FakeEngine.in_thread("x").generate("a").result().text
    assert text == "x"
    gc.collect()
    with pytest.raises(errors.ConfigError):
        EngineInThread(FakeEngine("x", config=EngineConfig(model="fake", num_pages=64, policy="no such")))
    gc.collect()
    for thread in own_threads.threads():
        thread.join(60)
    assert own_threads() == []


def test_a_call_from_its_own_loop_is_refused_and_not_waited_for() -> None:
    async def wait() -> None:
        engine.generate("a").result()

    with FakeEngine.in_thread("x") as engine, pytest.raises(errors.WrongLoop, match="await it"):
        engine.run(wait).result(60)
    with make_llm() as llm:

        async def call() -> None:
            llm.generate([1], SHORT)

        with pytest.raises(errors.WrongLoop, match="callback"):
            llm._run(call())


async def test_threadsafe_is_had_on_any_thread() -> None:
    async with FakeEngine("x") as engine:

        def work() -> str:
            return engine.threadsafe().generate("a").result(60).text

        assert await asyncio.to_thread(work) == "x"
    with pytest.raises(errors.EngineClosed, match=r"start\(\).*async with"):
        await asyncio.to_thread(FakeEngine("x").threadsafe)


async def test_what_was_had_before_a_restart_is_closed() -> None:
    engine = FakeEngine("x")
    await engine.start()
    remote = engine.threadsafe()
    await engine.aclose()
    await engine.start()
    for call in (remote.generate, remote.embed, remote.abort):
        with pytest.raises(errors.EngineClosed):
            call("a")
    assert (await engine.threadsafe().generate("a")).text == "x"
    await engine.aclose()


# -- after a fork ---------------------------------------------------------------------------------


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns or raises in a child of a fork, which has 60 seconds for it and then ends without
    what the parent wants done at its exit."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads, which this is about
        child = os.fork()
    if not child:
        try:
            done: Any = None
            threading.Timer(60, os._exit, (2,)).start()
            try:
                done = work()
            except BaseException as error:
                done = error if isinstance(error, errors.AioInferError) else traceback.format_exc()
            os.write(writing, pickle.dumps(done))
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as answer:
        told = answer.read()
    os.waitpid(child, 0)
    assert told, "the child did not answer"
    return pickle.loads(told)


def says_fork(work: Callable[[], Any]) -> None:
    error = in_child(work)
    assert isinstance(error, errors.EngineClosed), error
    assert "fork" in str(error)
    assert "process" in str(error)


OF_REMOTE: dict[str, Callable[[Any], Any]] = {
    "generate": lambda engine: engine.generate("a"),
    "chat": lambda engine: engine.chat([{"role": "user", "content": "a"}]),
    "embed": lambda engine: engine.embed("a"),
    "abort": lambda engine: engine.abort("a"),
    "adapters": lambda engine: engine.adapters(),
    "run": lambda engine: engine.run(lambda: asyncio.sleep(0)),
}


@pytest.mark.parametrize("call", OF_REMOTE)
def test_an_engine_in_a_thread_names_the_fork(call: str) -> None:
    with FakeEngine.in_thread("x") as engine:
        says_fork(lambda: OF_REMOTE[call](engine))
        assert engine.generate("a").result(60).text == "x"  # the parent goes on


def test_streams_of_other_threads_name_the_fork() -> None:
    with FakeEngine.in_thread(Answer("x", delay=600.0)) as engine:
        stream = engine.generate("a")
        read = [
            lambda: stream.result(60),
            stream.future,
            lambda: next(iter(stream)),
            lambda: asyncio.run(awaited(stream)),
        ]
        for each in read:
            says_fork(each)
        assert in_child(lambda: (stream.close(), engine.close(drain=True), "left")[-1]) == "left"
        stream.close()


async def awaited(stream: Any) -> Any:
    return await stream


OF_LLM: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate([1, 2], progress=False),
    "stream": lambda llm: llm.stream([1, 2]),
    "add_request": lambda llm: llm.add_request([1, 2]),
    "step": lambda llm: llm.step(),
    "take_chunks": lambda llm: llm.take_chunks(),
    "abort": lambda llm: llm.abort(1),
    "embed": lambda llm: llm.embed([[1, 2]], progress=False),
    "unload_adapter": lambda llm: llm.unload_adapter("x"),
}


@pytest.mark.parametrize("call", OF_LLM)
def test_an_llm_names_the_fork(call: str) -> None:
    with make_llm() as llm:
        llm.generate([1, 2], SHORT, progress=False)
        says_fork(lambda: OF_LLM[call](llm))
        assert in_child(lambda: (llm.close(), "closed")[-1]) == "closed"
        assert llm.generate([1, 2], SHORT, progress=False)[0].token_ids == toy_generate([1, 2], SHORT)


def test_a_stream_of_an_llm_names_the_fork() -> None:
    with make_llm() as llm:
        chunks = llm.stream([1, 2], LONG)
        next(chunks)
        says_fork(lambda: next(chunks))
        assert len(list(chunks)) > 1


def test_the_engine_of_a_loop_names_the_fork(make_engine: MakeEngine) -> None:
    engine = make_engine()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())
    stream = loop.run_until_complete(one_chunk(engine))
    untouched = loop.run_until_complete(one_chunk(engine))
    calls: list[Callable[[], Any]] = [
        lambda: engine.generate([1]),
        engine.threadsafe,
        engine.flush_cache,
        lambda: asyncio.run(awaited(engine.pause())),
        lambda: asyncio.run(awaited(stream)),
        lambda: loop.run_until_complete(read(stream)),  # on the copy of its own loop
        lambda: loop.run_until_complete(awaited(engine.embed([1]))),
    ]
    for call in calls:
        says_fork(call)

    def closed() -> list[str]:
        """What calls say once the copy is closed."""
        asyncio.run(engine.aclose())
        return [raised(call) for call in (*calls[:4], calls[-1], engine.stats, lambda: engine.info)]

    assert all("fork" in told for told in in_child(closed))
    assert loop.run_until_complete(awaited(untouched)).token_ids == toy_generate([1, 2], LONG)
    loop.run_until_complete(engine.aclose())
    loop.close()


def raised(call: Callable[[], Any]) -> str:
    with pytest.raises(errors.EngineClosed) as caught:
        call()
    return str(caught.value)


async def read(stream: Any) -> None:
    async for _ in stream:
        pass


def test_a_dispatcher_names_the_fork() -> None:
    dispatcher = Dispatcher([FakeEngine("x"), FakeEngine(Answer("x", delay=600.0))], policy="round_robin")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(dispatcher.start())
    remote = dispatcher.threadsafe()
    calls: list[Callable[[], Any]] = [
        lambda: dispatcher.generate("a"),
        dispatcher.threadsafe,
        lambda: remote.generate("a"),
        lambda: asyncio.run(awaited(dispatcher.restart("local-0"))),
        lambda: asyncio.run(awaited(dispatcher.load_adapter("a", "b"))),
        lambda: asyncio.run(awaited(dispatcher.start())),
    ]
    for call in calls:
        says_fork(call)
    assert in_child(lambda: asyncio.run(awaited(dispatcher.aclose()))) is None

    async def use() -> list[str]:
        return [(await dispatcher.generate("a")).text]

    assert loop.run_until_complete(use()) == ["x"]
    loop.run_until_complete(dispatcher.aclose())
    loop.close()


async def one_chunk(engine: Any) -> Any:
    stream = engine.generate([1, 2], LONG)
    await anext(stream)
    return stream


def test_an_engine_is_started_again_in_the_child(make_engine: MakeEngine) -> None:
    engine = make_engine()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.start())

    async def again() -> list[int]:
        await engine.aclose()
        async with engine:
            return (await engine.generate([1, 2], SHORT)).token_ids

    assert in_child(lambda: asyncio.run(again())) == toy_generate([1, 2], SHORT)
    loop.run_until_complete(engine.aclose())
    loop.close()


def test_an_engine_that_was_made_and_not_started_works_in_the_child(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def use() -> list[int]:
        async with engine:
            return (await engine.generate([1, 2], SHORT)).token_ids

    assert in_child(lambda: asyncio.run(use())) == toy_generate([1, 2], SHORT)


def of_processes(config: Any) -> Dispatcher:
    return Dispatcher(config=config, processes=1)


# -- first contact --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [Engine, LLM, Engine.in_thread, lambda name: FakeEngine(config=name), of_processes],
    ids=["engine", "llm", "in_thread", "fake", "processes"],
)
def test_a_name_in_the_place_of_a_config_is_told_how_to_be_one(make: Any) -> None:
    with pytest.raises(errors.ConfigError, match=r"EngineConfig\(model='tiny-chat'\)"):
        make("tiny-chat")


@pytest.mark.parametrize("make", [Engine, LLM, FakeEngine], ids=["Engine", "LLM", "FakeEngine"])
def test_a_setting_in_the_place_of_a_config_is_told_where_it_goes(make: Any) -> None:
    for name, home in (("model", "EngineConfig"), ("top_p", "SamplingParams"), ("replicas", "ServerConfig")):
        told = rf"^{make.__name__} has no argument '{name}': it is one of {home}\({name}=\.\.\.\)$"
        with pytest.raises(TypeError, match=told):
            make(**{name: 3})
    if make is not LLM:
        with pytest.raises(TypeError, match=f"^{make.__name__} has no argument 'modle'$"):
            make.in_thread(modle=3)


def test_answers_that_are_none_are_refused() -> None:
    with pytest.raises(errors.ConfigError, match="answers must be a text, or texts, got 3"):
        FakeEngine(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["max_tokens", "temperature", "grammar"])
async def test_a_parameter_in_the_place_of_an_option_is_told_where_it_goes(name: str) -> None:
    asked: Any = {name: 3}
    async with FakeEngine("x") as engine:
        for call in (
            lambda: engine.generate("a", **asked),
            lambda: engine.chat([{"role": "user", "content": "a"}], **asked),
        ):
            with pytest.raises(TypeError, match=rf"SamplingParams\({name}=\.\.\.\)"):
                call()
        with pytest.raises(TypeError, match=r"no option 'colour'$"):
            engine.generate("a", colour=3)  # type: ignore[call-arg]


async def test_a_result_that_is_asked_for_too_early_is_told_to_be_awaited(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        with pytest.raises(RuntimeError, match=r"await the stream.*threadsafe\(\)"):
            engine.generate("a").result()


def test_under_another_library_a_stream_names_the_way() -> None:
    with FakeEngine.in_thread("x") as engine:
        stream = engine.generate("a")
        for work in (awaited(stream), read(engine.generate("a"))):
            with pytest.raises(errors.WrongLoop, match=r"trio\.to_thread\.run_sync\(stream\.result\)"):
                work.send(None)
        assert stream.result(60).text == "x"
