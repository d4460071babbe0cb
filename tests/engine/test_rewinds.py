"""Rewinds and injections: the same stream goes on from earlier tokens, or from ones that were put there."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from aioinfer import EngineClosed, InvalidRequest, SamplingParams, TimedOut
from aioinfer.engine import Engine
from aioinfer.observe.observers import Observer
from aioinfer.request import Output
from aioinfer.scheduling.step import Step
from aioinfer.stream import Stream
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.engine.test_forks import GREEDY, LONG, PROMPT, ids_of, read, text_of, whole
from tests.engine.test_restoring import DIFFUSION, SCHEMA, same, two
from tests.parallel.toys import STEP, Toy, virtual
from tests.tiers import SECONDS, grid, rest, scaled
from tests.toys import ToyDevice, ToyTokenizer, toy_generate


async def test_a_rewound_stream_writes_the_same_again(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=128) as engine:
        wanted = toy_generate(PROMPT, LONG, seed=7)
        stream = engine.generate(PROMPT, LONG)
        chunks = await read(stream, 12)
        stream.rewind(5)
        text, ids, result = await whole(stream)
        assert ids == wanted[5:] == result.token_ids[5:]
        assert ToyTokenizer().decode(wanted[:5]) + text == result.text
        assert ids_of(chunks)[:5] == wanted[:5]
        stream.rewind(0)
        assert (await whole(stream))[1] == wanted
        await settle(engine)


async def test_the_request_before_is_not_taken_for_the_one_that_has_its_place(
    make_engine: MakeEngine,
) -> None:
    async with make_engine() as engine:
        await engine.pause()
        stream = engine.generate(PROMPT, GREEDY)
        await asyncio.sleep(0)
        later = engine.generate(PROMPT, GREEDY)
        waiting = engine._core.scheduler.queues.waiting
        first, second = waiting
        stream.inject([5])
        again, other = waiting
        assert (again.output_ids, other) == ([5], second)
        assert first not in waiting
        engine.resume()
        await asyncio.gather(stream, later)


async def test_what_is_injected_is_delivered_and_what_was_unread_is_not(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=128) as engine:
        stream = engine.generate(PROMPT, LONG)
        chunks = await read(stream, 3)
        while len(stream.result().token_ids) < 15:
            await asyncio.sleep(0)
        stream.inject([5, 6])
        wanted = toy_generate(PROMPT, LONG, seed=7, begun=[*ids_of(chunks), 5, 6])
        text, ids, result = await whole(stream)
        assert [*ids_of(chunks), *ids] == wanted == result.token_ids
        assert text_of(chunks) + text == result.text == ToyTokenizer().decode(wanted)
        assert ids[:2] == [5, 6]
        await settle(engine)


async def test_what_was_not_read_up_to_the_cut_is_delivered(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, LONG)
        chunks = await read(stream, 3)
        while len(stream.result().token_ids) < 20:
            await asyncio.sleep(0)
        stream.inject([9], at=15)
        text, ids, result = await whole(stream)
        known = toy_generate(PROMPT, LONG, seed=7)[:15]
        assert result.token_ids == toy_generate(PROMPT, LONG, seed=7, begun=[*known, 9])
        assert [*ids_of(chunks), *ids] == result.token_ids
        assert text_of(chunks) + text == result.text


@pytest.mark.parametrize("looks_up", [True, False])
@pytest.mark.parametrize("stop", [(), ("q", "zz")])
@pytest.mark.parametrize("logprobs", [None, 1])
async def test_every_piece_of_text_is_delivered_once(
    make_engine: MakeEngine, looks_up: bool, stop: tuple[str, ...], logprobs: int | None
) -> None:
    dice = random.Random(17)
    tokenizer = ToyTokenizer()
    harmless = [token for token in range(1, 64) if not {"q", "z"} & {*tokenizer.decode([token])}]
    async with make_engine(num_pages=256, tokenizer=lambda: ToyTokenizer(looks_up=looks_up)) as engine:
        for number in range(scaled(80, 12)):
            params = SamplingParams(max_tokens=60, seed=number, ignore_eos=True, stop=stop, logprobs=logprobs)
            stream = engine.generate(PROMPT, params)
            chunks: list[Any] = []
            for _ in range(dice.randint(1, 5)):
                async for chunk in stream:
                    chunks.append(chunk)
                    if dice.random() < 0.15:
                        break
                if stream.done and chunks[-1].finish_reason is not None and dice.random() < 0.3:
                    break
                # A cut between two chunks: what the reader has up to there is known to it.
                chunks = chunks[: dice.randint(0, len(chunks))]
                if chunks and chunks[-1].finish_reason is not None:
                    chunks.pop()
                at, then = len(ids_of(chunks)), dice.choices(harmless, k=dice.choice([1, 1, 3]))
                if dice.random() < 0.5 or at + len(then) >= 60:
                    stream.rewind(at)
                else:
                    stream.inject(then, at=at)
                    await stream.accepted()
            chunks += [chunk async for chunk in stream]
            result = stream.result()
            assert ids_of(chunks) == result.token_ids
            assert text_of(chunks) == result.text
            if logprobs is not None:
                assert [one for chunk in chunks for one in chunk.logprobs] == result.logprobs
                assert [one.token_id for one in result.logprobs or []] == result.token_ids
            if not stop:
                assert result.text == tokenizer.decode(result.token_ids)
        await settle(engine)


@pytest.mark.parametrize("how", ["awaited", "iterated"])
async def test_a_reader_that_waits_is_not_told_of_the_change(make_engine: MakeEngine, how: str) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, GREEDY)
        await stream.accepted()
        await engine.pause()
        known = stream.result().token_ids
        waiting = asyncio.create_task(whole(stream) if how == "iterated" else read_nothing(stream))
        await asyncio.sleep(0)
        stream.inject([4, 4], at=len(known))
        stream.inject("so", at=len(known) + 2)
        engine.resume()
        begun = [*known, 4, 4, *ToyTokenizer().encode_part("so")]
        text, ids, result = await waiting
        assert result.token_ids == toy_generate(PROMPT, GREEDY, begun=begun)
        if how == "iterated":
            assert (text, ids) == (result.text, result.token_ids)


async def read_nothing(stream: Stream) -> Any:
    return "", [], await stream


async def test_streams_that_have_ended_go_on(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        wanted = toy_generate(PROMPT, GREEDY)
        stop = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True, stop_token_ids=[wanted[9]])
        stream = engine.generate(PROMPT, stop)
        ended = (await stream).token_ids
        stream.inject([wanted[9] - 1])
        begun = [*ended[:-1], wanted[9] - 1]
        assert (await stream).token_ids[: len(begun)] == begun
        assert (await stream).token_ids == toy_generate(PROMPT, stop, begun=begun)
        stream = engine.generate(PROMPT, GREEDY)
        _, ids, _ = await whole(stream)
        with pytest.raises(InvalidRequest, match="max_tokens"):
            stream.inject([1])
        assert stream.result().token_ids == ids
        assert await anext(stream, None) is None
        for at in (39, 0):
            stream.rewind(at)
            assert not stream.done
            assert (await whole(stream))[1] == wanted[at:]
        await settle(engine)


async def test_what_cannot_be_is_refused_and_changes_nothing(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, GREEDY)
        ids = ids_of(await read(stream, 5))
        cases: list[tuple[str, Any]] = [
            ("to", lambda: stream.rewind(1000)),
            ("to", lambda: stream.rewind(-1)),
            ("to", lambda: stream.rewind(None)),  # type: ignore[arg-type]
            ("inject", lambda: stream.inject([])),
            ("inject", lambda: stream.inject("")),
            ("inject", lambda: stream.inject([64])),
            ("inject", lambda: stream.inject(5)),  # type: ignore[arg-type]
            ("at", lambda: stream.inject([1], at=1000)),
            ("max_tokens", lambda: stream.inject([1] * 40)),
        ]
        for field, call in cases:
            with pytest.raises(InvalidRequest) as caught:
                call()
            assert caught.value.field == field
        assert [*ids, *(await whole(stream))[1]] == toy_generate(PROMPT, GREEDY)
        stream = engine.generate(PROMPT, GREEDY)
        await read(stream, 5)
        stream.inject("a" * 35)
        with pytest.raises(RuntimeError, match="not tokenized yet"):
            stream.rewind(0)
        with pytest.raises(InvalidRequest, match="max_tokens"):
            await stream
        await settle(engine)


# -- the same request ----------------------------------------------------------------------------------


async def test_a_rewritten_request_keeps_its_place(make_engine: MakeEngine, gate: Gate) -> None:
    async with make_engine(max_running_requests=1, fault=gate) as engine:
        short = GREEDY.changed(max_tokens=6)
        running, second, third = (engine.generate([each, 2, 3], short) for each in (1, 2, 3))
        gate.step(3)
        while len(running.result().token_ids) < 2:
            await asyncio.sleep(0)
        running.rewind(1)
        second.inject([9])
        gate.release()
        ends: list[float] = []
        for stream, begun in ((running, []), (second, [9]), (third, [])):
            result = await stream
            assert result.token_ids == toy_generate(result.prompt_token_ids, short, begun=begun)
            assert result.metrics is not None
            assert result.metrics.finished is not None
            ends.append(result.metrics.finished)
        assert ends == sorted(ends)
        await settle(engine)


@virtual
async def test_a_deadline_goes_on() -> None:
    async with Toy() as engine:
        stream = engine.generate(PROMPT, GREEDY, running_timeout=20 * STEP)
        with pytest.raises(TimedOut, match="running"):
            while True:
                async for _ in stream:
                    if len(stream.result().token_ids) > 5:
                        stream.rewind(0)
        waiting = [engine.generate(PROMPT, GREEDY, waiting_timeout=3 * STEP) for _ in range(2)]
        await engine.pause()
        waiting[0].inject([5])
        waiting[1].inject("text")
        for stream in waiting:
            with pytest.raises(TimedOut, match="waiting"):
                await stream
        engine.resume()
        await asyncio.sleep(5 * STEP)
        await settle(engine)


async def test_a_step_that_fails_with_what_is_gone_harms_nobody(make_engine: MakeEngine, gate: Gate) -> None:
    failing: list[BaseException] = []

    def fault(step: Step) -> None:
        gate(step)
        if failing:
            raise failing.pop()

    async with make_engine(fault=fault) as engine:
        stream = engine.generate(PROMPT, GREEDY, max_lag=50)
        gate.step(4)
        for _ in range(5):
            await asyncio.to_thread(gate.arrived.acquire)  # the fifth waits with its rows
        await anext(stream)
        failing.append(RuntimeError("bad step"))
        stream.rewind(1)
        gate.release()
        assert (await stream).token_ids == toy_generate(PROMPT, GREEDY)
        await settle(engine)


async def test_observers_see_an_end_for_every_output(make_engine: MakeEngine) -> None:
    class Counting(Observer):
        def __init__(self) -> None:
            self.open: set[Output] = set()
            self.ends: list[str | None] = []

        def opened(self, output: Output, *, chat: bool) -> None:
            self.open.add(output)

        def ended(self, output: Output) -> None:
            self.open.remove(output)
            self.ends.append(output.finish_reason)

    async with make_engine() as engine:
        seen = Counting()
        engine.observe(seen)
        stream = engine.generate(PROMPT, GREEDY, request_id="mine")
        await read(stream, 4)
        stream.rewind(1)
        await stream
        stream.rewind(1)
        await stream
        stream.inject("so", at=1)
        assert engine.abort("mine") == 1
        assert not seen.open
        assert seen.ends == ["abort", "length", "length", "abort"]


async def test_leaving_while_text_is_tokenized(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        for leave in ("close", "drop", "cancel"):
            stream: Stream | None = engine.generate(PROMPT, GREEDY)
            assert stream is not None
            await read(stream, 4)
            stream.inject("so")
            assert engine.stats().arriving == 1
            if leave == "close":
                stream.close()
            elif leave == "cancel":
                task = asyncio.create_task(whole(stream))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            stream = None
            await asyncio.sleep(0)
            await settle(engine)


@pytest.mark.parametrize("snapshots", [None, 0, 4])
@pytest.mark.parametrize("pages", [24, 128])
async def test_streams_that_are_rewritten_at_random(
    make_engine: MakeEngine, snapshots: int | None, pages: int
) -> None:
    device = ToyDevice(snapshots=snapshots, num_pages=pages)
    async with make_engine(device=device, num_pages=pages, max_running_requests=5) as engine:

        async def live(seed: int) -> None:
            dice = random.Random(seed)
            prompt = dice.choices(range(1, 64), k=dice.randint(1, 12))
            params = SamplingParams(max_tokens=30, ignore_eos=True, seed=seed)
            stream = engine.generate(prompt, params, max_lag=dice.choice([None, 3]))
            ids: list[int] = []
            begun: list[int] = []
            for _ in range(dice.randint(0, 4)):
                async for chunk in stream:
                    ids += chunk.token_ids
                    if dice.random() < 0.2:
                        break
                at = dice.randint(0, min(len(ids), 27))
                ids = ids[:at]
                if dice.random() < 0.5:
                    stream.rewind(at)
                    begun = begun[:at]
                else:
                    begun = [*ids, dice.randrange(1, 64)]
                    stream.inject(begun[-1:], at=at)
                if dice.random() < 0.1:
                    stream.close()
                    return
            async for chunk in stream:
                ids += chunk.token_ids
            assert ids == stream.result().token_ids
            assert ids == toy_generate(prompt, params, seed=seed, begun=begun)

        for batch in range(scaled(20, 3)):
            await asyncio.gather(*(live(100 * batch + each) for each in range(12)))
        await settle(engine)


# -- models --------------------------------------------------------------------------------------------


@pytest.mark.native
@rest(SECONDS)
async def test_a_grammar_holds_behind_what_is_injected() -> None:
    async with Engine() as engine:
        params = SamplingParams(max_tokens=60, seed=1, grammar=SCHEMA, logprobs=0)
        stream = engine.generate("Hello", params)
        await anext(stream)
        start = await engine.tokenize('{"name": "', add_special_tokens=False)
        stream.inject(start, at=0)
        result = await stream
        assert result.text.startswith('{"name": "')
        assert result.token_ids[: len(start)] == start
        stream.rewind(len(start))
        same(await stream, result)
        (fork,) = stream.fork(then="no object", at=0)
        stream.inject("no object", at=0)
        for each, field in ((fork, "then"), (stream, "inject")):
            with pytest.raises(InvalidRequest) as caught:
                await each
            assert caught.value.field == field


@rest(SECONDS)
async def test_blocks_are_cut_at_any_token() -> None:
    from tests.model.harness import require

    require("native")
    dice = random.Random(4)
    async with two("tiny-diffusion") as (one, other):
        for number, kind in enumerate(DIFFUSION.values()):
            params = SamplingParams(seed=number, max_tokens=30, ignore_eos=True, **kind)
            stream = one.generate("copy: a longer text to copy\n", params)
            result = await stream
            for at in dice.sample(range(30), 3):
                then = [] if dice.random() < 0.5 or at > 26 else result.token_ids[:2]
                (fork,) = stream.fork(at=at, then=then)
                await fork.accepted()
                again = other.restore(fork.checkpoint())
                text, ids, found = await whole(fork)
                same(found, await again)
                assert found.token_ids[: at + len(then)] == [*result.token_ids[:at], *then]
                assert ids == found.token_ids[at:]
                assert found.text.endswith(text)
                if then:
                    stream.inject(then, at=at)
                else:
                    stream.rewind(at)
                found = await stream
                assert found.token_ids[: at + len(then)] == [*result.token_ids[:at], *then]
                assert len(found.token_ids) == 30
                result = found
        await settle(one)


@rest(SECONDS)
@pytest.mark.parametrize("temperature", grid([100.0], [1.5]))
async def test_broken_characters_are_cut_where_they_are(temperature: float) -> None:
    """Random tokens of a vocabulary of bytes: most cuts are within a character."""
    dice = random.Random(8)
    async with Engine() as engine:
        for number in range(12):
            params = SamplingParams(seed=number, max_tokens=30, temperature=temperature, ignore_eos=True)
            stream = engine.generate("Hello", params)
            parent = await stream
            for at in dice.sample(range(30), 6):
                (fork,) = stream.fork(at=at)
                text, _, result = await whole(fork)
                assert result.token_ids[:at] == parent.token_ids[:at]
                detokenizer = engine.tokenizer.detokenizer(result.prompt_token_ids, skip_special_tokens=True)  # type: ignore[union-attr]
                released = "".join(map(detokenizer.push, result.token_ids[:at]))
                rest_of = "".join(map(detokenizer.push, result.token_ids[at:])) + detokenizer.finish()
                assert (result.text, text) == (released + rest_of, rest_of)


async def test_a_stream_is_rewritten_while_the_engine_lets_it_end(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate([1, 2], LONG, max_lag=1)
        await anext(stream)
        closing = asyncio.create_task(engine.aclose(drain=True))
        await asyncio.sleep(0)
        stream.inject([7], at=1)
        result = await stream
        assert (result.token_ids[1], len(result.token_ids)) == (7, LONG.max_tokens)
        await closing
        with pytest.raises(EngineClosed):
            stream.rewind(2)
