"""Streams: every way in, every way out, and that every way out gives the memory back."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.params import SamplingParams
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.toys import ToyTokenizer, toy_generate

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPT = [1, 2, 3]


async def test_iterating_awaiting_and_entering_give_the_same(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        chunks = [chunk async for chunk in engine.generate(PROMPT, SHORT)]
        result = await engine.generate(PROMPT, SHORT)
        async with engine.generate(PROMPT, SHORT) as stream:
            entered = [chunk async for chunk in stream]
            again = await stream
    wanted = toy_generate(PROMPT, SHORT)
    assert result.token_ids == again.token_ids == wanted
    assert [token for chunk in chunks for token in chunk.token_ids] == wanted
    assert "".join(chunk.text for chunk in entered) == result.text == ToyTokenizer().decode(wanted)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["length"]
    assert chunks[-1].usage == result.usage
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 10)


async def test_text_ids_and_messages_are_prompts(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        messages = [{"role": "user", "content": "hi"}]
        tokenizer = ToyTokenizer()
        for prompt, ids in (
            ("hello", tokenizer.encode("hello")),
            (messages, tokenizer.encode_chat(messages)),
            ((4, 5), [4, 5]),
        ):
            result = await engine.generate(prompt, SHORT)
            assert result.token_ids == toy_generate(ids, SHORT)
            assert result.usage.prompt_tokens == len(ids)


async def test_streams_run_side_by_side_from_the_moment_they_are_made(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        streams = [engine.generate([number, 2], SHORT) for number in range(1, 6)]
        results = [await stream for stream in streams]
        assert engine.stats().steps < 5 * 10
    assert [result.token_ids for result in results] == [toy_generate([n, 2], SHORT) for n in range(1, 6)]


@pytest.mark.parametrize("way", ["break", "exception", "cancel", "timeout", "aclose", "collect", "exit"])
async def test_every_way_out_aborts_and_gives_back(make_engine: MakeEngine, way: str, gate: Gate) -> None:
    async with make_engine(fault=gate) as engine:

        async def read() -> None:
            async for _ in engine.generate(PROMPT, LONG):
                if way == "break":
                    break
                if way == "exception":
                    raise KeyError("mine")

        gate.step(4)
        if way == "break":
            await read()
        elif way == "exception":
            with pytest.raises(KeyError):
                await read()
        elif way == "cancel":
            task = asyncio.create_task(read())
            await asyncio.to_thread(gate.arrived.acquire)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif way == "timeout":
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await read()
        elif way == "aclose":
            stream = engine.generate(PROMPT, LONG)
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
            assert [chunk async for chunk in stream] == []
        elif way == "collect":
            stream = engine.generate(PROMPT, LONG)
            await anext(stream)
            del stream
        else:
            async with engine.generate(PROMPT, LONG) as stream:
                await anext(stream)
        # A dropped stream is noticed by the collector and handled one turn of the loop later.
        gc.collect()
        await asyncio.sleep(0)
        assert not engine._core.scheduler.queues.has_unfinished
        launched = engine.stats().steps
        gate.release()
        await settle(engine)
        assert engine.stats().steps == launched, "a step was launched for a request that nobody wants"


async def test_a_stream_closes_at_once_while_the_device_hangs(make_engine: MakeEngine, gate: Gate) -> None:
    async with make_engine(fault=gate) as engine:
        stream = engine.generate(PROMPT, LONG)
        reader = asyncio.create_task(anext(stream))
        await asyncio.to_thread(gate.arrived.acquire)
        closed = asyncio.create_task(stream.aclose())
        await asyncio.sleep(0)
        assert closed.done()
        with pytest.raises(errors.Cancelled):
            await reader
        gate.release()


async def test_a_request_can_end_while_its_prompt_is_tokenized(make_engine: MakeEngine) -> None:
    go_on = threading.Event()

    class Slow(ToyTokenizer):
        def encode(self, text: str) -> list[int]:
            go_on.wait(timeout=60)
            return super().encode(text)

    async with make_engine(tokenizer=Slow) as engine:
        closed = engine.generate("first", SHORT)
        late = engine.generate("second", SHORT, waiting_timeout=0.01)
        served = engine.generate("third", SHORT)
        assert engine.stats().arriving == 3
        with pytest.raises(RuntimeError, match="not been tokenized"):
            closed.result()
        with pytest.raises(errors.TimedOut):
            await late
        closed.close()
        assert closed.done
        assert not served.done
        assert engine.stats().arriving == 1
        go_on.set()
        assert (await served).token_ids == toy_generate(ToyTokenizer().encode("third"), SHORT)
        assert engine.stats().admitted == 1
        with pytest.raises(errors.Cancelled):
            await closed


async def test_awaiting_a_closed_stream_says_so(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, LONG)
        await stream.aclose()
        with pytest.raises(errors.Cancelled):
            await stream
        early = engine.generate("still being tokenized", LONG)
        await early.aclose()
        with pytest.raises(errors.Cancelled):
            await early


async def test_two_readers_of_one_stream_are_refused(make_engine: MakeEngine, gate: Gate) -> None:
    async with make_engine(fault=gate) as engine:
        stream = engine.generate(PROMPT, SHORT)
        first = asyncio.create_task(anext(stream))
        await asyncio.to_thread(gate.arrived.acquire)
        with pytest.raises(RuntimeError, match="another task"):
            await anext(stream)
        gate.release()
        assert (await first).token_ids


async def test_a_slow_reader_gets_fewer_larger_chunks(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, SHORT)
        while not stream.done:
            await asyncio.sleep(0)
        chunks = [chunk async for chunk in stream]
    assert len(chunks) == 1
    assert chunks[0].token_ids == toy_generate(PROMPT, SHORT)


async def test_without_a_tokenizer_ids_stream_alone(make_engine: MakeEngine) -> None:
    async with make_engine(tokenizer=None) as engine:
        chunks = [chunk async for chunk in engine.generate(PROMPT, SHORT)]
        assert [token for chunk in chunks for token in chunk.token_ids] == toy_generate(PROMPT, SHORT)
        assert {chunk.text for chunk in chunks} == {""}
        with pytest.raises(errors.InvalidRequest, match="no tokenizer"):
            engine.generate("text", SHORT)
        with pytest.raises(errors.InvalidRequest, match="stop"):
            engine.generate(PROMPT, SamplingParams(stop="x"))


async def test_min_tokens_holds_the_end_back(make_engine: MakeEngine) -> None:
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 100}
    async with make_engine() as engine:
        for first in range(1, 60):
            free = await engine.generate([first], SamplingParams(**params))
            if len(free.token_ids) < 12:
                break
        held = await engine.generate([first], SamplingParams(**params, min_tokens=15))
    assert len(free.token_ids) < 12
    assert len(held.token_ids) > 15
    assert 0 not in held.token_ids[:15]


@pytest.mark.parametrize("stops", [{"stop": ("e", "t")}, {"stop_regex": "[et]"}], ids=["strings", "patterns"])
@pytest.mark.parametrize("include", [False, True])
async def test_min_tokens_holds_stops_back(
    make_engine: MakeEngine, stops: dict[str, Any], include: bool
) -> None:
    """With any window, and with tokens that come several at a time."""
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60, "include_stop": include, **stops}
    held = 0
    for changes in ({"overlap_steps": 0}, {"overlap_steps": 2}, {"speculation": "lookup"}):
        async with make_engine(**changes) as engine:
            for first in range(1, 20):
                early = await engine.generate([first], SamplingParams(**params))
                late = await engine.generate([first], SamplingParams(**params, min_tokens=20))
                if early.stop_reason is None or late.stop_reason == 0:
                    continue
                held += len(early.token_ids) <= 20 < len(late.token_ids)
                assert len(late.token_ids) > 20
                assert late.text.startswith(early.text)
    assert held > 10
