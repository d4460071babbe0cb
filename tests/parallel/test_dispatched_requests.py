"""What an application asks of a dispatcher: all that it may ask of an engine, with the same answers."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator
from typing import Any

import pytest

from aioinfer import (
    EngineClosed,
    InvalidRequest,
    Rejected,
    SamplingParams,
    StepFailed,
    StreamCheckpoint,
    TimedOut,
)
from aioinfer.parallel import Dispatcher
from aioinfer.params import Grammar
from aioinfer.request import Output
from aioinfer.stream import Stream
from aioinfer.testing import Answer, FakeEngine
from tests.parallel.toys import (
    ENDLESS,
    PARAMS,
    STEP,
    Toy,
    attempt_of,
    end,
    expected,
    prompt,
    toys,
    turn,
    virtual,
)
from tests.toys import ToyTokenizer


async def ends(*streams: Any) -> list[Any]:
    return await asyncio.gather(*streams, return_exceptions=True)


# -- limits, order, deadlines --------------------------------------------------------------------------


@virtual
async def test_requests_wait_in_the_dispatcher_and_not_in_a_replica() -> None:
    engines = toys(2, max_running_requests=2)
    async with Dispatcher(engines) as dispatcher:
        streams = [dispatcher.generate(prompt(number), ENDLESS) for number in range(10)]
        await asyncio.sleep(5 * STEP)
        assert [each.load.requests for each in dispatcher._replicas] == [2, 2]
        assert [each.stats().waiting for each in engines] == [0, 0]
        stats = dispatcher.stats()
        assert (stats.running, stats.waiting, stats.waiting_tokens) == (4, 6, 6 * 16)
        await end(streams)
        assert dispatcher.stats().waiting == 0


@pytest.mark.parametrize("policy", ["round_robin", "prefix", "p2c"])
@virtual
async def test_who_comes_first_is_served_first_across_replicas(policy: str) -> None:
    async with Dispatcher(toys(3, max_running_requests=2), policy=policy) as dispatcher:
        lengths = [(7 * number) % 11 + 2 for number in range(40)]
        streams = [
            dispatcher.generate(prompt(number), SamplingParams(max_tokens=length, ignore_eos=True))
            for number, length in enumerate(lengths)
        ]
        await asyncio.gather(*streams)
        admitted = [each.cell.output.admitted_at for each in streams]
        # A step that was under way when both came may be longer on one replica than on the next.
        assert all(first is not None and second is not None and first <= second + 2 * STEP
                   for first, second in itertools.pairwise(admitted))  # fmt: skip


@virtual
async def test_priorities_order_the_queue_of_all() -> None:
    async with Dispatcher(toys(2, max_running_requests=1, policy="priority")) as dispatcher:
        filling = [dispatcher.generate(prompt(number), PARAMS, priority=9) for number in range(2)]
        await asyncio.sleep(2 * STEP)
        priorities = [0, 2, 1, 2, 0, 1]
        streams = [
            dispatcher.generate(prompt(number), PARAMS, priority=priority)
            for number, priority in enumerate(priorities)
        ]
        await asyncio.gather(*filling, *streams)
        order = sorted(range(6), key=lambda number: streams[number].cell.output.admitted_at or 0)
        assert [priorities[number] for number in order] == [2, 2, 1, 1, 0, 0]


@virtual
async def test_parts_of_a_job_queue_behind_later_requests() -> None:
    async with Dispatcher(toys(1, max_running_requests=1)) as dispatcher:
        blocked = dispatcher.generate(prompt(0), PARAMS)
        await asyncio.sleep(2 * STEP)
        job = [dispatcher.generate(prompt(number), PARAMS, queue_behind=number) for number in range(4)]
        later = dispatcher.generate(prompt(9), PARAMS)
        await asyncio.gather(blocked, *job, later)
        at = later.cell.output.admitted_at
        assert at is not None
        assert sum((each.cell.output.admitted_at or 0) < at for each in job) == 2


@pytest.mark.parametrize("kind", ["ids", "text"])
@virtual
async def test_a_full_queue_refuses(kind: str) -> None:
    settings: dict[str, Any] = {"max_running_requests": 1, "max_queued_requests": 3}
    async with Dispatcher(toys(2, **settings)) as dispatcher:
        asked: Any = "abc" if kind == "text" else [1, 2, 3]
        running = [dispatcher.generate([1, 2, 3], ENDLESS) for _ in range(2)]
        await turn()
        waiting = [dispatcher.generate(asked, ENDLESS) for _ in range(3)]
        with pytest.raises(Rejected, match="3 requests are waiting already") as refused:
            dispatcher.generate(asked, ENDLESS, request_id="mine")
        assert refused.value.request_id == "mine"
        waiting[0].close()
        await turn()
        assert dispatcher.generate(asked, ENDLESS).request_id
        await end([*running, *waiting])


@virtual
async def test_what_free_slots_of_replicas_take_does_not_wait() -> None:
    async with Dispatcher(toys(2, max_running_requests=2, max_queued_requests=1)) as dispatcher:
        burst = [dispatcher.generate([1, 2, 3], ENDLESS) for _ in range(5)]
        with pytest.raises(Rejected, match="1 requests are waiting already"):
            dispatcher.generate([1, 2, 3], ENDLESS)
        await end(burst)


@virtual
async def test_too_many_tokens_in_the_queue_are_refused() -> None:
    settings: dict[str, Any] = {"max_running_requests": 1, "max_queued_tokens": 100}
    async with Dispatcher(toys(2, **settings)) as dispatcher:
        running = [dispatcher.generate([1, 2, 3], ENDLESS) for _ in range(2)]
        await turn()
        waiting = dispatcher.generate(prompt(1, 60), ENDLESS)
        with pytest.raises(Rejected, match="60 prompt tokens are waiting"):
            dispatcher.generate(prompt(2, 41), ENDLESS)
        await end([*running, waiting])


@virtual
async def test_deadlines_hold_in_the_queue_and_on_replicas() -> None:
    loop = asyncio.get_running_loop()
    async with Dispatcher(toys(2, max_running_requests=1)) as dispatcher:
        running = [dispatcher.generate(prompt(number), ENDLESS, running_timeout=0.5) for number in range(2)]
        await turn()
        start = loop.time()
        with pytest.raises(TimedOut) as waited:
            await dispatcher.generate(prompt(3), ENDLESS, waiting_timeout=0.2)
        assert waited.value.phase == "waiting"
        assert loop.time() - start == pytest.approx(0.2)
        assert "0.2 s" in str(waited.value)
        for error in await ends(*running):
            assert isinstance(error, TimedOut)
            assert (error.phase, "0.5 s" in str(error)) == ("running", True)
        assert loop.time() - start == pytest.approx(0.5, abs=3 * STEP)
        assert not dispatcher.stats().running


@virtual
async def test_the_running_deadline_goes_on_while_a_stream_waits_for_another_replica() -> None:
    loop = asyncio.get_running_loop()
    engines = toys(2, max_running_requests=1)
    async with Dispatcher(engines, policy="round_robin") as dispatcher:
        start = loop.time()
        lost = dispatcher.generate(prompt(0), ENDLESS, running_timeout=0.5, waiting_timeout=0.2)
        other = dispatcher.generate(prompt(1), ENDLESS)
        await asyncio.sleep(0.1)
        engines[0].lose()
        await turn()
        assert attempt_of(lost) is None, "the other replica has no room for it"
        with pytest.raises(TimedOut) as late:
            await lost
        assert late.value.phase == "running"
        assert loop.time() - start == pytest.approx(0.5, abs=2 * STEP)
        assert not other.done
        await end([other])


@virtual
async def test_the_waiting_deadline_goes_on_when_a_replica_is_lost_before_the_first_step() -> None:
    loop = asyncio.get_running_loop()
    engines = toys(2, max_running_requests=1)
    async with Dispatcher(engines, policy="round_robin") as dispatcher:
        other = dispatcher.generate(prompt(1), ENDLESS)
        await turn()
        await engines[1].pause()
        start = loop.time()
        lost = dispatcher.generate(prompt(0), ENDLESS, waiting_timeout=0.5)
        await asyncio.sleep(0.1)
        assert not lost.admitted
        engines[1].lose()
        with pytest.raises(TimedOut) as late:
            await lost
        assert late.value.phase == "waiting"
        assert loop.time() - start == pytest.approx(0.5, abs=2 * STEP)
        await end([other])


# -- readers -------------------------------------------------------------------------------------------


@virtual
async def test_a_slow_reader_parks_its_request() -> None:
    engines = toys(2)
    async with Dispatcher(engines) as dispatcher:
        slow = dispatcher.generate(prompt(1), SamplingParams(max_tokens=60, ignore_eos=True), max_lag=5)
        quick = dispatcher.generate(prompt(2), PARAMS)
        await quick
        await asyncio.sleep(100 * STEP)
        made = len(slow.cell.output.token_ids)
        assert 5 < made <= 9, "tokens in flight arrive still"
        await asyncio.sleep(100 * STEP)
        assert len(slow.cell.output.token_ids) == made
        assert sum(each.stats().parkings for each in engines) == dispatcher.stats().parkings == 1
        ids = []
        async for chunk in slow:
            ids += chunk.token_ids
            await asyncio.sleep(2 * STEP)
        assert len(ids) == 60
        assert ids == slow.result().token_ids


@pytest.mark.parametrize("how", ["close", "cancel", "drop", "break"])
@virtual
async def test_leaving_frees_the_memory_of_the_replica_within_two_steps(how: str) -> None:
    (engine,) = engines = toys(1, prefix_cache=False)
    async with Dispatcher(engines) as dispatcher:
        free = engine.stats().pages_free
        stream = dispatcher.generate(prompt(1, 100), ENDLESS)
        if how == "cancel":
            reading = asyncio.ensure_future(stream.__anext__())
            await asyncio.sleep(4.5 * STEP)
            await reading
            waiting = asyncio.ensure_future(_read(stream))
            await asyncio.sleep(STEP)
            waiting.cancel()
        elif how == "break":
            async for _ in stream:
                break
            stream.close()
        else:
            await asyncio.sleep(4.5 * STEP)
            if how == "close":
                stream.close()
        assert engine.stats().pages_free < free
        if how == "drop":
            del stream
            gc.collect()
        await asyncio.sleep(2.5 * STEP)
        assert engine.stats().pages_free == free
        assert dispatcher.stats().running == 0
        assert not dispatcher._replicas[0].load.requests
        assert not dispatcher._started().open


async def _read(stream: AsyncIterator[Any]) -> None:
    async for _ in stream:
        pass


# -- refusals ------------------------------------------------------------------------------------------

WRONG: list[tuple[Any, SamplingParams, str]] = [
    ([], PARAMS, "prompt"),
    ([1, 64], PARAMS, "prompt"),
    ("x" * 5000, PARAMS, "prompt"),
    ([1] * 4096, PARAMS, "prompt"),
    ([1] * 4000, SamplingParams(min_tokens=97), "min_tokens"),
    ([1], SamplingParams(stop_token_ids=[64]), "stop_token_ids"),
    ([1], SamplingParams(logit_bias={99: 1.0}), "logit_bias"),
    ([1], SamplingParams(grammar=Grammar("json_schema", {"type": "nonsense"})), "grammar"),
    ("abc", SamplingParams(grammar=Grammar("regex", "(((")), "grammar"),
]


@pytest.mark.parametrize(("asked", "params", "field"), WRONG)
@virtual
async def test_what_an_engine_refuses_a_dispatcher_refuses_at_the_same_moment(
    asked: Any, params: SamplingParams, field: str
) -> None:
    found = []
    async with Toy() as engine, Dispatcher(toys(2)) as dispatcher:
        for each in (engine, dispatcher):
            moment = "at the call"
            with pytest.raises(InvalidRequest) as refused:
                stream = each.generate(asked, params, request_id="mine")
                moment = "before it is accepted"
                await stream.accepted()
            error = refused.value
            found.append((moment, error.field, error.code, error.message, error.request_id))
        assert not dispatcher._started().open
        assert not dispatcher.stats().waiting
    assert found[0] == found[1]
    assert found[0][1] == field


@virtual
async def test_what_a_replica_raises_ends_only_that_request() -> None:
    def answers(text: str) -> str:
        if "raise" in text:
            raise ValueError("a bug")
        return "fine"

    async with Dispatcher([FakeEngine(answers), FakeEngine(answers)]) as dispatcher:
        results = await ends(*(dispatcher.generate(each) for each in ("one", "raise", "two")))
        assert [results[0].text, results[2].text] == ["fine", "fine"]
        assert isinstance(results[1], StepFailed)
        assert isinstance(results[1].__cause__, ValueError)
        assert not any(each.load.requests for each in dispatcher._replicas)
        dispatcher._replicas[0].engine.answers = None  # type: ignore[attr-defined]
        assert not dispatcher._started().open


# -- the rest of the surface ---------------------------------------------------------------------------


@virtual
async def test_text_tokens_and_back() -> None:
    async with Toy() as engine, Dispatcher(toys(2)) as dispatcher:
        assert await dispatcher.tokenize("hello") == await engine.tokenize("hello")
        ids = await dispatcher.tokenize([{"role": "user", "content": "hi"}])
        assert ids == await engine.tokenize([{"role": "user", "content": "hi"}])
        assert await dispatcher.detokenize(ids) == await engine.detokenize(ids)
        with pytest.raises(InvalidRequest):
            await dispatcher.detokenize([64])
        assert isinstance(dispatcher.tokenizer, ToyTokenizer)
        wanted = await engine.generate("hello", PARAMS)
        for source in ("hello", dispatcher.prompt("hello"), await engine.tokenize("hello")):
            found = await dispatcher.generate(source, PARAMS)
            assert (found.text, found.token_ids) == (wanted.text, wanted.token_ids)
            assert found.usage.prompt_tokens == 5
        with pytest.raises(InvalidRequest, match="another engine"):
            dispatcher.generate(engine.prompt("hello"), PARAMS)


@virtual
async def test_chats_with_reasoning_and_tools() -> None:
    def weather(city: str) -> str:
        """The weather."""
        return city

    answer = Answer("Let me see.", reasoning="Rome?", tool_calls=[("weather", {"city": "Rome"})])
    async with Dispatcher([FakeEngine(answer), FakeEngine(answer)]) as dispatcher:
        chat = dispatcher.chat([{"role": "user", "content": "The weather in Rome?"}], tools=[weather])
        assert chat.request_id
        await chat.accepted()
        result = await chat
        assert (result.reasoning, result.content) == ("Rome?", "Let me see.")
        assert result.tool_calls[0].arguments == '{"city": "Rome"}'
        answers = {"Again?": "Yes.", "": "No."}
        for replica in dispatcher._replicas:
            replica.engine.answers = answers  # type: ignore[attr-defined]
        messages = [{"role": "user", "content": "Again?"}]
        text = "".join([delta.content async for delta in dispatcher.chat(messages) if delta.content])
        assert text == "Yes."
        with pytest.raises(InvalidRequest, match="messages"):
            dispatcher.chat([])


@virtual
async def test_map_and_choices() -> None:
    async with Dispatcher(toys(2, max_running_requests=2)) as dispatcher:
        prompts = [prompt(number) for number in range(20)]
        async with dispatcher.map(prompts, PARAMS) as results:
            found = [result.token_ids async for result in results]
        assert found == [expected(ids) for ids in prompts]
        drawn = SamplingParams(max_tokens=8, ignore_eos=True, seed=5)
        choices = await asyncio.gather(*dispatcher.choices(prompt(1), drawn, n=4))
        assert len({tuple(each.token_ids) for each in choices}) > 1
        async with Toy() as engine:
            alone = await asyncio.gather(*engine.choices(prompt(1), drawn, n=4))
        assert [each.token_ids for each in choices] == [each.token_ids for each in alone]
        with pytest.raises(InvalidRequest):
            dispatcher.choices(prompt(1), n=0)


@virtual
async def test_a_map_waits_while_others_fill_the_queue_of_a_dispatcher() -> None:
    async with Dispatcher(toys(2, max_running_requests=1, max_queued_requests=2)) as dispatcher:
        running = [dispatcher.generate(prompt(1), ENDLESS) for _ in range(2)]
        await turn()
        others = [dispatcher.generate(prompt(1), ENDLESS) for _ in range(2)]
        found: list[list[int]] = []

        async def mapped() -> None:
            async for result in dispatcher.map([prompt(number) for number in range(6)], PARAMS):
                found.append(result.token_ids)

        job = asyncio.create_task(mapped())
        await asyncio.sleep(5)  # of a virtual clock
        assert not found
        await end([*running, *others])
        await job
        assert found == [expected(prompt(number)) for number in range(6)]


@virtual
async def test_request_ids_are_the_callers_or_made_and_need_not_be_unique() -> None:
    async with Dispatcher(toys(2)) as dispatcher:
        streams = [dispatcher.generate([1, 2], PARAMS, request_id="same") for _ in range(4)]
        made = [dispatcher.generate([1, 2], PARAMS) for _ in range(4)]
        assert {each.request_id for each in streams} == {"same"}
        assert len({each.request_id for each in made}) == 4
        for stream in (*streams, *made):
            result = await stream
            assert result.request_id == stream.request_id
            assert result.token_ids == expected([1, 2])


@virtual
async def test_checkpoints_go_from_dispatchers_to_engines_and_back() -> None:
    ids = prompt(4)
    params = SamplingParams(max_tokens=20, ignore_eos=True, seed=11)
    async with Dispatcher(toys(2)) as dispatcher, Toy() as engine:
        whole = await engine.generate(ids, params)
        stream = dispatcher.generate(ids, params)
        read = [token for _ in range(5) for token in (await anext(stream)).token_ids]
        checkpoint = StreamCheckpoint.from_json(stream.checkpoint().to_json())
        stream.close()
        for each in (engine, dispatcher):
            restored = each.restore(checkpoint)
            rest = [token async for chunk in restored for token in chunk.token_ids]
            assert read + rest == whole.token_ids
            result = restored.result()
            assert (result.token_ids, result.resumed) == (whole.token_ids, len(checkpoint.token_ids))
            assert result.request_id == checkpoint.request_id
        with pytest.raises(RuntimeError, match="complete"):
            restored.checkpoint()
        with pytest.raises(InvalidRequest, match="checkpoint"):
            dispatcher.restore("no checkpoint")  # type: ignore[arg-type]
    # Its engines are gone; what was delivered can go on elsewhere.
    async with Dispatcher(toys(2)) as dispatcher:
        stream = dispatcher.generate(ids, params)
        await anext(stream)
        await dispatcher.aclose()
        with pytest.raises(EngineClosed):
            await stream
        checkpoint = stream.checkpoint()
    async with Toy() as engine:
        assert (await engine.restore(checkpoint)).token_ids == whole.token_ids


@virtual
async def test_nothing_of_a_request_that_ended_waits_for_the_collection_of_cycles() -> None:
    async with Dispatcher(toys(2)) as dispatcher:
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for seed in range(3):
                result = await dispatcher.generate(prompt(seed), PARAMS)
                assert result.token_ids == expected(prompt(seed))
            gc.collect()
            assert not [each for each in gc.garbage if isinstance(each, (Output, Stream))]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
