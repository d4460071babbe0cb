"""Worker threads: each prompt is tokenized once, what nobody waits for is not, and short prompts never wait
for more than one long prompt."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections import Counter
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from aioinfer.stream import Stream
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.tiers import SECONDS, rest
from tests.toys import ToyTokenizer, toy_generate

SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
LONG_TEXT = "x" * 40_000


class Gated(ToyTokenizer):
    """Texts that begin with "!" and long ones wait until the gate opens."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.begun = threading.Semaphore(0)
        self.encoded: Counter[str] = Counter()
        self.longest_token = 1 << 20

    def encode(self, text: str) -> list[int]:
        self.encoded[text] += 1
        if text.startswith("!") or len(text) > 1000:
            self.begun.release()
            self.gate.wait()
        return super().encode(text[:20])


@pytest.fixture
def gated() -> Any:
    tokenizer = Gated()
    yield tokenizer
    tokenizer.gate.set()


def waiting(engine: Engine) -> int:
    return engine._started()._intake.waiting


async def until_waiting(engine: Engine, count: int) -> None:
    while waiting(engine) != count:
        await asyncio.sleep(0)


async def test_a_prompt_is_tokenized_once_for_all_its_requests(make_engine: MakeEngine, gated: Gated) -> None:
    gated.gate.set()
    async with make_engine(tokenizer=lambda: gated) as engine:
        prompt = engine.prompt("hello")
        seeds = [SamplingParams(temperature=1, seed=seed, max_tokens=5) for seed in range(20)]
        results = await asyncio.gather(*[engine.generate(prompt, params) for params in seeds])
        later = await engine.generate(prompt, SHORT)
        ids = gated.encode("hello")
    assert gated.encoded == {"hello": 2}, "once for the requests, once here"
    assert [r.token_ids for r in results] == [toy_generate(ids, p, seed=p.seed) for p in seeds]
    assert later.token_ids == toy_generate(ids, SHORT)


async def test_a_prompt_that_cannot_be_tokenized_fails_each_of_its_requests(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        prompt = engine.prompt("x" * 300)
        streams = [engine.generate(prompt) for _ in range(3)]
        found = await asyncio.gather(*streams, return_exceptions=True)
        assert all(isinstance(error, errors.InvalidRequest) for error in found)
        assert len(set(map(id, found))) == 3, "tasks may not share an exception"


async def test_a_prompt_belongs_to_the_engine_that_made_it(make_engine: MakeEngine) -> None:
    async with make_engine() as engine, make_engine() as other:
        prompt = engine.prompt([1, 2, 3])
        with pytest.raises(errors.InvalidRequest, match="another engine"):
            other.generate(prompt)
        with pytest.raises(errors.InvalidRequest, match="chat_template_kwargs"):
            engine.generate(prompt, chat_template_kwargs={})
        assert (await engine.generate(prompt, SHORT)).token_ids == toy_generate([1, 2, 3], SHORT)


@pytest.mark.parametrize("way", ["close", "abandon", "timeout"])
async def test_work_that_nobody_waits_for_is_not_begun(
    make_engine: MakeEngine, gated: Gated, way: str
) -> None:
    async with make_engine(tokenizer=lambda: gated, max_queued_requests=8) as engine:
        blocking = [engine.generate(f"!{number}") for number in range(2)]
        for _ in blocking:
            await asyncio.to_thread(gated.begun.acquire)
        for number in range(1000):
            timeout = 0.001 if way == "timeout" else None
            stream = engine.generate(f"left {number}", waiting_timeout=timeout)
            if timeout is None:  # else it may have left before it is seen
                await until_waiting(engine, 1)
            if way == "close":
                stream.close()
            elif way == "abandon":
                del stream
                await asyncio.sleep(0)
            elif number < 5:
                with pytest.raises(errors.TimedOut):
                    await stream
            else:
                stream.close()
            await until_waiting(engine, 0)
            assert engine.stats().arriving == 2
        gated.gate.set()
        await asyncio.gather(*blocking)
        assert set(gated.encoded) == {"!0", "!1"}
        await settle(engine)


async def test_one_of_several_requests_for_a_prompt_may_leave(make_engine: MakeEngine, gated: Gated) -> None:
    async with make_engine(tokenizer=lambda: gated) as engine:
        blocking = [engine.generate(f"!{number}") for number in range(2)]
        for _ in blocking:
            await asyncio.to_thread(gated.begun.acquire)
        prompt = engine.prompt("hello")
        first, second = engine.generate(prompt, SHORT), engine.generate(prompt, SHORT)
        await until_waiting(engine, 2)
        first.close()
        await until_waiting(engine, 1)
        second.close()
        await until_waiting(engine, 0)
        third = engine.generate(prompt, SHORT)
        gated.gate.set()
        assert (await third).token_ids == toy_generate(ToyTokenizer().encode("hello"), SHORT)
        assert gated.encoded["hello"] == 1


async def test_long_prompts_do_not_delay_short_ones(make_engine: MakeEngine, gated: Gated) -> None:
    """One of the two threads is never used for a long prompt while another long one runs."""
    async with make_engine(tokenizer=lambda: gated) as engine:
        long = [engine.generate(f"{number}{LONG_TEXT}", SHORT) for number in range(5)]
        await asyncio.to_thread(gated.begun.acquire)
        for number in range(20):
            await engine.generate(f"short {number}", SHORT)
        assert sum(len(text) > 1000 for text in gated.encoded) == 1
        assert waiting(engine) == 4
        gated.gate.set()
        await asyncio.gather(*long)


async def test_prompts_that_are_tokenized_count_as_queued(make_engine: MakeEngine, gated: Gated) -> None:
    gated.longest_token = 4
    async with make_engine(tokenizer=lambda: gated, max_queued_tokens=300) as engine:
        await engine.pause()
        streams = [engine.generate("!" + "x" * 399) for _ in range(3)]
        with pytest.raises(errors.Rejected, match="max_queued_tokens"):
            engine.generate("!" + "x" * 399)
        streams.pop().close()
        streams.append(engine.generate("!" + "x" * 399))
        gated.gate.set()
        engine.resume()
        await asyncio.gather(*streams)


async def test_a_group_can_make_a_task_of_a_stream(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate([number, 2], SHORT)) for number in (1, 3)]
        assert [task.result().token_ids for task in tasks] == [
            toy_generate([number, 2], SHORT) for number in (1, 3)
        ]
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                group.create_task(engine.generate("x" * 300))
                task = group.create_task(engine.generate([1], SamplingParams(ignore_eos=True)))
        assert caught.group_contains(errors.InvalidRequest)
        assert task.cancelled()
        unstarted = asyncio.create_task(engine.generate([1], SamplingParams(ignore_eos=True)))
        unstarted.cancel()
        await asyncio.wait([unstarted])
        assert engine.stats().running == engine.stats().waiting == 0
        await settle(engine)


async def test_the_result_of_a_refused_request_is_its_error(make_engine: MakeEngine) -> None:
    async with make_engine(max_queued_tokens=130) as engine:
        await engine.pause()
        long, short = engine.generate("x" * 300), engine.generate("x" * 200)
        taking_the_place = engine.generate([1] * 2)
        with pytest.raises(RuntimeError, match="not been tokenized"):
            short.result()
        for stream, error in ((long, errors.InvalidRequest), (short, errors.Rejected)):
            with pytest.raises(error):
                await stream
            with pytest.raises(error):
                stream.result()
        closed = engine.generate("abc")
        closed.close()
        with pytest.raises(errors.Cancelled):
            closed.result()
        engine.resume()
        assert (await taking_the_place).usage.prompt_tokens == 2


@rest(SECONDS)
def test_a_stream_that_outlives_its_loop_keeps_no_device(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def ask() -> Stream:
        await engine.start()
        stream = engine.generate([1, 2, 3], SamplingParams(ignore_eos=True))
        await anext(stream)
        return stream

    async def close() -> None:
        await engine.aclose()

    stream = asyncio.run(ask())
    launcher = weakref.ref(engine._started().launcher)
    asyncio.run(close())
    # The launch thread lets go of the step that was in flight.
    deadline = time.monotonic() + 60
    while launcher() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.001)
    assert launcher() is None
    with pytest.raises(errors.EngineClosed):
        asyncio.run(_read(stream))
    stream.close()


async def _read(stream: Stream) -> None:
    async for _ in stream:
        pass
