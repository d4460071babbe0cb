"""The life of a dispatcher: starts, closings, what it refuses, what it says of itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from aioinfer import (
    ConfigError,
    EngineClosed,
    EngineError,
    EngineFailed,
    InvalidRequest,
    SamplingParams,
    WrongLoop,
)
from aioinfer.engine import EngineState
from aioinfer.parallel import Dispatcher
from aioinfer.testing import FakeEngine, VirtualLoop
from tests.parallel.toys import ENDLESS, PARAMS, STEP, Toy, expected, prompt, record, toys, turn, virtual
from tests.tiers import SECONDS, rest
from tests.toys import toy_generate

# -- what is given -------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, 5, [], (), "engines", [None], [Toy, Toy], [Toy(), "toy"], iter([])])
def test_what_is_no_list_of_engines_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match="engines must be one or more Engines"):
        Dispatcher(given)


def test_the_same_engine_twice_is_refused() -> None:
    engine = Toy()
    with pytest.raises(ConfigError, match="twice"):
        Dispatcher([engine, Toy(), engine])
    with pytest.raises(ConfigError, match="on_loss must be one of identical, continue, fail"):
        Dispatcher([engine], on_loss="ignore")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("other", "name"), [({"vocab_size": 32}, "vocab_size"), ({"longest": 1000}, "max_model_len")]
)
@virtual
async def test_engines_of_different_models_are_refused_and_closed(other: dict[str, Any], name: str) -> None:
    engines = [Toy(), Toy(**other)]
    with pytest.raises(ConfigError, match=f"local-1 has {name}"):
        await Dispatcher(engines).start()
    assert [each.state for each in engines] == [EngineState.CLOSED] * 2
    async with Dispatcher([Toy()]) as dispatcher:
        with pytest.raises(ConfigError, match=f"local-1 has {name}"):
            await dispatcher.add(engines[1])
        assert engines[1].closed
        assert len(dispatcher.stats().replicas) == 1
        assert not dispatcher.degraded


# -- starting and closing ------------------------------------------------------------------------------


@virtual
async def test_a_dispatcher_starts_closes_and_starts_again() -> None:
    engines = toys(2)
    dispatcher = Dispatcher(engines)
    assert (dispatcher.state, dispatcher.closed, dispatcher.ready) == (EngineState.NEW, True, False)
    for name in ("info", "tokenizer", "timeline"):
        with pytest.raises(EngineClosed):
            getattr(dispatcher, name)
    with pytest.raises(EngineClosed, match="the dispatcher is new"):
        dispatcher.generate([1])
    with pytest.raises(EngineClosed):
        dispatcher.stats()
    await dispatcher.aclose()
    for round_ in range(1, 4):
        await dispatcher.start()
        assert (dispatcher.state, dispatcher.closed, dispatcher.ready) == (EngineState.RUNNING, False, True)
        assert [each.launches for each in engines] == [round_] * 2
        with pytest.raises(EngineError, match="it is running"):
            await dispatcher.start()
        assert (await dispatcher.generate([1, 2], PARAMS)).token_ids == expected([1, 2])
        assert dispatcher.stats().output_tokens == 8
        await dispatcher.aclose()
        await dispatcher.aclose()
        assert all(each.closed for each in engines)
        assert dispatcher.stats().state == "closed"
        with pytest.raises(EngineClosed, match="the dispatcher is closed"):
            dispatcher.generate([1])


@virtual
async def test_engines_that_run_already_are_taken_as_they_are() -> None:
    engines = toys(2)
    await engines[1].start()
    async with Dispatcher(engines) as dispatcher:
        assert [each.launches for each in engines] == [1, 1]
        own = engines[1].generate([1, 2], PARAMS)
        assert (await dispatcher.generate([1, 2], PARAMS)).token_ids == (await own).token_ids
    assert all(each.closed for each in engines)


class Failing(Toy):
    """Cannot be started, or takes for ever to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.begun = asyncio.Event()

    async def start(self, progress: Any = None) -> None:
        self.begun.set()
        if self.how == "fails":
            raise ConfigError("no such model")
        await asyncio.sleep(3600)


@virtual
async def test_a_start_that_fails_closes_all_engines() -> None:
    engines = [Toy(), Failing("fails"), Toy()]
    dispatcher = Dispatcher(engines)
    with pytest.raises(ConfigError, match="no such model"):
        await dispatcher.start()
    assert all(each.closed for each in engines)
    assert (dispatcher.state, engines[2].launches) == (EngineState.CLOSED, 0)
    await dispatcher.aclose()


@virtual
async def test_a_start_that_is_cancelled_closes_all_engines() -> None:
    engines = [Toy(), Failing("hangs"), Toy()]
    dispatcher = Dispatcher(engines)
    starting = asyncio.ensure_future(dispatcher.start())
    await engines[1].begun.wait()  # type: ignore[attr-defined]
    assert dispatcher.state is EngineState.STARTING
    with pytest.raises(EngineError, match="still starting"):
        await dispatcher.aclose()
    with pytest.raises(EngineError, match="it is starting"):
        await dispatcher.start()
    with pytest.raises(EngineClosed, match="is starting"):
        dispatcher.generate([1])
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert all(each.closed for each in engines)
    assert dispatcher.state is EngineState.CLOSED


def test_an_engine_of_another_loop_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    engines = toys(2)
    elsewhere = VirtualLoop()
    elsewhere.run_until_complete(engines[1].start())

    async def start() -> None:
        with pytest.raises(WrongLoop):
            await Dispatcher(engines).start()
        assert engines[0].closed
        assert engines[1].ready, "it belongs to others, who go on with it"

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(start())
    elsewhere.run_until_complete(engines[1].aclose())
    elsewhere.close()
    assert "could not be closed" in caplog.text


def test_a_dispatcher_belongs_to_its_loop() -> None:
    dispatcher = Dispatcher(toys(2))
    elsewhere = VirtualLoop()
    elsewhere.run_until_complete(dispatcher.start())
    stream: Any = None

    async def make() -> None:
        nonlocal stream
        stream = dispatcher.generate([1, 2], ENDLESS)
        await turn()

    elsewhere.run_until_complete(make())

    async def use() -> None:
        for call in (lambda: dispatcher.generate([1]), dispatcher.flush_cache, dispatcher.resume):
            with pytest.raises(WrongLoop):
                call()
        for ask in (dispatcher.aclose, dispatcher.pause, dispatcher.restart):
            with pytest.raises(WrongLoop):
                await ask()
        with pytest.raises(WrongLoop):
            await dispatcher.add(Toy())
        with pytest.raises(WrongLoop):
            await dispatcher.remove("local-0")
        with pytest.raises(WrongLoop):
            await stream

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(use())
    elsewhere.run_until_complete(dispatcher.aclose())
    elsewhere.close()


def test_a_dispatcher_that_outlived_its_loop_can_be_started_again() -> None:
    engines = toys(2)
    dispatcher = Dispatcher(engines)
    streams = []

    async def start() -> None:
        await dispatcher.start()
        streams.append(dispatcher.generate([1, 2], ENDLESS))
        streams.append(dispatcher.generate("text", ENDLESS))

    async def again() -> None:
        async with dispatcher:
            assert all(stream.done for stream in streams)
            with pytest.raises(EngineClosed):
                await streams[0]
            assert (await dispatcher.generate([1, 2], PARAMS)).token_ids == expected([1, 2])

    for program in (start, again):
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(program())
    assert all(each.closed for each in engines)


# -- closing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [[1, 2], "text"])
@virtual
async def test_closing_cuts_streams(asked: Any) -> None:
    engines = toys(2, max_running_requests=2)
    dispatcher = Dispatcher(engines)
    await dispatcher.start()
    streams = [dispatcher.generate(asked, ENDLESS) for _ in range(10)]
    await asyncio.sleep(3.5 * STEP)
    streams += [dispatcher.generate(asked, ENDLESS) for _ in range(3)]  # whose text is not tokenized yet
    await dispatcher.aclose()
    for stream in streams:
        with pytest.raises(EngineClosed, match="the dispatcher was closed"):
            await stream
    assert all(each.closed for each in engines)
    assert not any(each.load.requests for each in dispatcher._replicas)
    stats = dispatcher.stats()
    assert (stats.arriving, stats.waiting, stats.running) == (0, 0, 0)
    await asyncio.sleep(1)


@virtual
async def test_closing_with_drain_lets_streams_finish() -> None:
    dispatcher = Dispatcher(toys(2, max_running_requests=1))
    await dispatcher.start()
    prompts: list[Any] = [prompt(number) for number in range(5)]
    streams = [dispatcher.generate(ids, PARAMS) for ids in prompts]
    streams.append(dispatcher.generate("not tokenized yet", PARAMS))
    closing = asyncio.ensure_future(dispatcher.aclose(drain=True))
    await turn()
    assert (dispatcher.state, dispatcher.ready) == (EngineState.DRAINING, False)
    with pytest.raises(EngineClosed, match="draining"):
        dispatcher.generate([1])
    results = await asyncio.gather(*streams)
    assert [each.token_ids for each in results[:5]] == [expected(ids) for ids in prompts]
    await closing
    assert dispatcher.closed


@rest(SECONDS)
@virtual
async def test_draining_ends_when_its_time_is_up_or_somebody_is_in_a_hurry() -> None:
    loop = asyncio.get_running_loop()
    for hurry in (False, True):
        dispatcher = Dispatcher(toys(2, drain_timeout=7.0))
        await dispatcher.start()
        stream = dispatcher.generate([1, 2], SamplingParams(max_tokens=4000, ignore_eos=True))
        start = loop.time()
        closing = asyncio.ensure_future(dispatcher.aclose(drain=True, timeout=None if not hurry else 20.0))
        await asyncio.sleep(1.0)
        if hurry:
            await dispatcher.aclose()
        await closing
        assert loop.time() - start == pytest.approx(1.0 if hurry else 7.0, abs=5 * STEP)
        with pytest.raises(EngineClosed):
            await stream
        with pytest.raises(InvalidRequest, match="timeout"):
            async with Dispatcher(toys(1)) as other:
                await other.aclose(drain=True, timeout=-1.0)


@virtual
async def test_streams_end_when_the_last_replica_is_lost_while_draining() -> None:
    loop = asyncio.get_running_loop()
    (engine,) = engines = toys(1)
    dispatcher = Dispatcher(engines)
    await dispatcher.start()
    stream = dispatcher.generate([1, 2], ENDLESS)
    closing = asyncio.ensure_future(dispatcher.aclose(drain=True, timeout=60.0))
    await asyncio.sleep(3 * STEP)
    engine.lose()
    with pytest.raises(EngineFailed, match="no replica is left"):
        await stream
    await closing
    assert loop.time() < 1.0, "there is nothing to wait for"
    assert dispatcher.closed


class Slow(Toy):
    """Takes a while to close."""

    async def aclose(self, *, drain: bool = False, timeout: float | None = None) -> None:
        await asyncio.sleep(1.0)
        await super().aclose(drain=drain, timeout=timeout)


@virtual
async def test_closed_is_said_when_the_engines_are() -> None:
    engines = [Slow(), Toy()]
    dispatcher = Dispatcher(engines)
    await dispatcher.start()
    first = asyncio.ensure_future(dispatcher.aclose())
    await asyncio.sleep(0.1)
    assert not dispatcher.closed
    with pytest.raises(EngineError, match="it is draining"):
        await dispatcher.start()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    await dispatcher.aclose()
    assert all(each.closed for each in engines), "a second call waits for what the first one began"
    assert dispatcher.closed


@virtual
async def test_an_engine_that_cannot_be_closed_does_not_keep_others_open() -> None:
    class Broken(Toy):
        async def aclose(self, **options: Any) -> None:
            await super().aclose()
            raise OSError("the device is busy")

    engines = [Broken(), Slow()]
    dispatcher = Dispatcher(engines)
    await dispatcher.start()
    with pytest.raises(OSError, match="busy"):
        await dispatcher.aclose()
    assert all(each.closed for each in engines)
    assert dispatcher.closed


# -- pausing -------------------------------------------------------------------------------------------


@virtual
async def test_pause_and_resume() -> None:
    engines = toys(3)
    async with Dispatcher(engines) as dispatcher:
        streams = [dispatcher.generate(prompt(number), PARAMS) for number in range(6)]
        await asyncio.sleep(3.5 * STEP)
        await dispatcher.pause()
        assert dispatcher.stats().paused
        made = [len(record(each).output.token_ids) for each in streams]
        late = dispatcher.generate([1, 2], PARAMS)
        await asyncio.sleep(50 * STEP)
        assert [len(record(each).output.token_ids) for each in streams] == made
        # Who joins is paused, too.
        await dispatcher.add(Toy())
        await dispatcher.restart("local-3")
        assert dispatcher._replicas[3].engine.stats().paused
        assert dispatcher.stats().paused
        dispatcher.resume()
        dispatcher.resume()
        assert not dispatcher.stats().paused
        results = await asyncio.gather(*streams, late)
        assert results[0].token_ids == expected(prompt(0))
        assert results[-1].token_ids == expected([1, 2])
        engines[0].lose()
        await dispatcher.pause()
        for engine in engines[1:]:
            engine.lose()
        dispatcher._replicas[3].engine.lose()  # type: ignore[attr-defined]
        with pytest.raises(EngineFailed):
            await dispatcher.pause()
        dispatcher.resume()


@virtual
async def test_flushing_forgets_the_prefixes_of_all() -> None:
    async with Dispatcher(toys(3), policy="round_robin") as dispatcher:
        await asyncio.gather(*(dispatcher.generate(prompt(number), PARAMS) for number in range(6)))
        assert dispatcher.stats().pages_cached > 0
        assert dispatcher.flush_cache() > 0
        assert dispatcher.stats().pages_cached == 0
        assert (await dispatcher.generate(prompt(1), PARAMS)).usage.cached_tokens == 0


# -- other threads -------------------------------------------------------------------------------------


async def test_other_threads() -> None:
    async with Dispatcher([FakeEngine({"": "Hello!"}), FakeEngine({"": "Hello!"})]) as dispatcher:
        remote = dispatcher.threadsafe()

        def work() -> list[str]:
            texts = [remote.generate("Hi").result(60).text]
            texts.append("".join(chunk.text for chunk in remote.generate("Hi")))
            remote.generate("Hi").close()
            return texts

        assert await asyncio.to_thread(work) == ["Hello!"] * 2
        while dispatcher._started().open:
            await asyncio.sleep(0)
    with pytest.raises(EngineClosed):
        remote.generate("Hi")
    with pytest.raises(EngineClosed):
        dispatcher.threadsafe()


@virtual
async def test_weights_are_replaced_in_one_engine_after_the_other() -> None:
    engines = toys(2)
    async with Dispatcher(engines, policy="round_robin") as dispatcher:
        streams = [dispatcher.generate(prompt(number), PARAMS.changed(max_tokens=40)) for number in range(4)]
        firsts = [await anext(stream) for stream in streams]
        with pytest.raises(ConfigError, match="of a toy they are one integer"):
            await dispatcher.update_weights({"weights": None})
        assert [engine.weight_version for engine in engines] == [0, 0]
        assert await dispatcher.update_weights({"weights": 1}) == 1 == dispatcher.weight_version
        assert [engine.weight_version for engine in engines] == [1, 1]
        for number, stream in enumerate(streams):
            chunks = [firsts[number], *[chunk async for chunk in stream]]
            ids = [token for chunk in chunks for token in chunk.token_ids]
            before = sum(len(chunk.token_ids) for chunk in chunks if chunk.weight_version == 0)
            params = PARAMS.changed(max_tokens=40)
            assert ids[:before] == toy_generate(prompt(number), params)[:before]
            assert ids == toy_generate(prompt(number), params, weights=1, begun=ids[:before])
            assert (stream.result().weight_version, stream.result().identical) == (1, False)
        assert dispatcher.stats().weight_version == 1
        # Also of what has no tokens.
        score = SamplingParams(max_tokens=0, prompt_logprobs=0)
        assert (await dispatcher.generate(prompt(1), score)).weight_version == 1
