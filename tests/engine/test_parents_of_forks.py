"""What a fork finds of its parent, whatever that does: waits, prefills, is parked or retracted, has ended."""

from __future__ import annotations

import asyncio

import pytest

from aioinfer import InvalidRequest
from aioinfer.params import SamplingParams
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_forks import GREEDY, LONG, PROMPT, ids_of, read, whole
from tests.toys import toy_generate


async def test_nothing_is_forked_before_the_prompt_is_tokenized(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate("text", GREEDY)
        for call in (stream.fork, lambda: stream.rewind(0), lambda: stream.inject([1])):
            with pytest.raises(RuntimeError, match=r"await stream\.accepted"):
                call()
        await stream.accepted()
        assert (await stream.fork()[0]).token_ids == (await stream).token_ids


async def test_a_waiting_and_a_prefilling_parent(make_engine: MakeEngine, gate: Gate) -> None:
    prompts = [[*range(1, 50)], [*range(2, 60)]]
    async with make_engine(max_running_requests=1, chunk_size=8, num_pages=128, fault=gate) as engine:
        running, waiting = (engine.generate(each, GREEDY) for each in prompts)
        gate.step(2)
        while not running.admitted:
            await asyncio.sleep(0)
        forks = [*running.fork(2), *waiting.fork(2)]
        gate.release()
        asked = [*prompts, *[prompts[0]] * 2, *[prompts[1]] * 2]
        for stream, prompt in zip([running, waiting, *forks], asked, strict=True):
            assert (await stream).token_ids == toy_generate(prompt, GREEDY)
        await settle(engine)


async def test_a_parked_parent(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=128) as engine:
        stream = engine.generate(PROMPT, LONG, max_lag=4)
        first = await anext(stream)
        while not stream.cell.parked:
            await asyncio.sleep(0)
        assert len(stream.result().token_ids) > len(first.token_ids)
        (fork,) = stream.fork(max_lag=100)
        wanted = toy_generate(PROMPT, LONG, seed=8, begun=first.token_ids)
        assert (await fork).token_ids == wanted
        stream.inject([9, 9])
        begun = [*first.token_ids, 9, 9]
        _, ids, result = await whole(stream)
        assert result.token_ids == toy_generate(PROMPT, LONG, seed=7, begun=begun)
        assert ids == result.token_ids[len(first.token_ids) :]
        await settle(engine)


async def test_forks_while_requests_are_retracted(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=30, max_running_requests=6) as engine:
        stream = engine.generate(PROMPT, LONG)
        found, ids = [], []
        async for chunk in stream:
            ids += chunk.token_ids
            if len(found) < 12:
                found += [(each, len(ids)) for each in stream.fork(2)]
        for number, (fork, at) in enumerate(found):
            wanted = toy_generate(PROMPT, LONG, seed=8 + number % 2, begun=ids[:at])
            assert (await fork).token_ids == wanted
        assert engine.stats().retractions
        await settle(engine)


async def test_a_parent_that_ended_at_its_length(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        short = GREEDY.changed(max_tokens=6)
        stream = engine.generate(PROMPT, short)
        ids = (await stream).token_ids
        with pytest.raises(InvalidRequest, match="max_tokens"):
            stream.fork()
        (fork,) = stream.fork(params=GREEDY)
        text, more, result = await whole(fork)
        assert result.token_ids == toy_generate(PROMPT, GREEDY)
        assert more == result.token_ids[len(ids) :]
        assert result.text == stream.result().text + text
        assert (await stream.fork(at=3)[0]).token_ids == ids


async def test_a_parent_that_ended_at_a_stop_goes_on_without_it(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        usual = toy_generate(PROMPT, GREEDY)
        stop = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=[usual[12]])
        ended = usual.index(usual[12])
        for include in (False, True):
            stream = engine.generate(PROMPT, stop.changed(include_stop=include))
            assert (await stream).token_ids == usual[: ended + 1]
            with pytest.raises(InvalidRequest, match="ends the output"):
                stream.fork(at=ended + 1)
            (fork,) = stream.fork(params=GREEDY)
            text, more, result = await whole(fork)
            assert (result.token_ids, more) == (usual, usual[ended:])
            assert result.text.endswith(text)
            (other,) = stream.fork(then=[usual[12] - 1])
            assert (await other).token_ids[: ended + 1] == [*usual[:ended], usual[12] - 1]


async def test_a_parent_that_ended_at_a_stop_string(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        text = (await engine.generate(PROMPT, GREEDY)).text
        stop = text[20:22]
        stream = engine.generate(
            PROMPT, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop=stop)
        )
        ended = await stream
        assert (ended.finish_reason, ended.stop_reason) == ("stop", stop)
        assert (await stream.fork()[0]).text == ended.text
        (beyond,) = stream.fork(at=len(ended.token_ids))
        with pytest.raises(InvalidRequest, match="ends the output") as caught:
            await beyond
        assert caught.value.field == "stop"
        (on,) = stream.fork(params=GREEDY, at=len(ended.token_ids))
        assert (await on).text == text


async def test_a_parent_that_was_aborted(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, GREEDY, request_id="mine")
        ids = ids_of(await read(stream, 5))
        engine.abort("mine")
        (fork,) = stream.fork()
        assert fork.request_id != "mine"
        assert (await fork).token_ids == toy_generate(PROMPT, GREEDY)
        assert (await whole(stream.fork()[0]))[1] == toy_generate(PROMPT, GREEDY)[len(ids) :]


async def test_a_stream_that_is_awaited_forks_at_all_that_is_known(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, LONG)
        waiting = asyncio.create_task(stream)
        await asyncio.sleep(0)
        while len(stream.result().token_ids) < 10:
            await asyncio.sleep(0)
        known = stream.result().token_ids
        (fork,) = stream.fork()
        assert (await fork).token_ids[: len(known)] == known
        assert fork.result().resumed == len(known)
        await waiting
        await read(stream, 3)
        assert stream.fork(params=LONG.changed(max_tokens=80))[0].result().resumed <= 40
        await stream
        assert stream.fork(params=LONG.changed(max_tokens=80))[0].result().resumed == 40
