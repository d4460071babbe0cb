"""Pausing the engine, parking requests whose consumers lag, and what stats() says of it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from aioinfer import errors
from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.toys import toy_generate

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPT = [1, 2, 3]


async def until_idle(engine: Engine) -> None:
    """Nothing is in flight and nothing will be."""
    async with asyncio.timeout(60):
        while (
            (stats := engine.stats()).steps_in_flight or stats.waiting or stats.prefilling or stats.decoding
        ):
            await asyncio.sleep(0.001)


async def test_a_paused_engine_finishes_its_steps_and_starts_no_other(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, LONG)
        await anext(stream)
        await engine.pause()
        await engine.pause()
        steps = engine.stats().steps
        late = engine.generate([4, 5], SHORT)
        for _ in range(20):
            await asyncio.sleep(0)
        stats = engine.stats()
        assert (stats.paused, stats.steps, stats.steps_in_flight, stats.waiting) == (True, steps, 0, 1)
        assert stats.stalled == 0, "a paused engine is not stuck"
        engine.resume()
        assert (await late).token_ids == toy_generate([4, 5], SHORT)
        assert (await stream).token_ids == toy_generate(PROMPT, LONG)


async def test_pausing_waits_for_what_is_in_flight(make_engine: MakeEngine, gate: Gate) -> None:
    async with make_engine(fault=gate, overlap_steps=2) as engine:
        stream = engine.generate(PROMPT, SHORT)
        await asyncio.to_thread(gate.arrived.acquire)
        pausing = asyncio.ensure_future(engine.pause())
        await asyncio.sleep(0)
        assert not pausing.done()
        gate.release()
        await pausing
        assert engine.stats().steps_in_flight == 0
        engine.resume()
        await stream


async def test_pausing_ends_when_the_engine_does(make_engine: MakeEngine, gate: Gate) -> None:
    async with make_engine(fault=gate) as engine:
        stream = engine.generate(PROMPT, SHORT)
        await asyncio.to_thread(gate.arrived.acquire)
        pausing = asyncio.ensure_future(engine.pause())
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(engine.aclose())
        await asyncio.sleep(0)
        gate.release()
        await closing
        with pytest.raises(errors.EngineClosed):
            await pausing
        with pytest.raises(errors.EngineClosed):
            await stream


@pytest.mark.parametrize("window", [0, 1, 2])
async def test_a_reader_that_lags_parks_its_request_and_reading_resumes_it(
    make_engine: MakeEngine, window: int
) -> None:
    async with make_engine(overlap_steps=window) as engine:
        stream = engine.generate(PROMPT, LONG, max_lag=4)
        other = await engine.generate([4, 5], LONG)
        assert other.token_ids == toy_generate([4, 5], LONG), "others go on"
        await until_idle(engine)
        lag = len(stream.result().token_ids)
        assert 4 < lag <= 4 + 1 + window, "a few tokens were in flight"
        assert engine.stats().parkings == 1
        assert engine.stats().stalled == 0, "waiting for a consumer is not being stuck"
        ids = []
        async for chunk in stream:
            ids += chunk.token_ids
            assert len(chunk.token_ids) <= 4 + 1 + window
            await until_idle(engine)
        assert ids == toy_generate(PROMPT, LONG)
        assert engine.stats().parkings > 5
        await settle(engine)


async def test_awaiting_the_result_is_not_lagging(make_engine: MakeEngine) -> None:
    async with make_engine(max_lag=1) as engine:
        assert (await engine.generate(PROMPT, LONG)).token_ids == toy_generate(PROMPT, LONG)
        stream = engine.generate(PROMPT, LONG)
        await until_idle(engine)
        assert engine.stats().running == 1
        assert (await stream).token_ids == toy_generate(PROMPT, LONG)


@pytest.mark.parametrize("short_of", ["slots", "pages"])
async def test_a_parked_request_gives_way_to_others(make_engine: MakeEngine, short_of: str) -> None:
    """Its pages and its slot are taken when they are needed, and its tokens are none the worse."""
    limits = {"max_running_requests": 1} if short_of == "slots" else {"num_pages": 17}
    async with make_engine(**limits) as engine:
        prompt = [7] * 20
        lagging = engine.generate(prompt, SHORT, max_lag=2)
        await until_idle(engine)
        for number in range(3):
            ids = [10 + number] * 50
            assert (await engine.generate(ids, SHORT)).token_ids == toy_generate(ids, SHORT)
        assert engine.stats().retractions == 1
        assert engine.stats().shelved == 1
        assert (await lagging).token_ids == toy_generate(prompt, SHORT)
        await settle(engine)


async def test_a_parked_request_still_ends_when_told_to(make_engine: MakeEngine) -> None:
    async with make_engine() as engine:
        closed = engine.generate(PROMPT, LONG, max_lag=1)
        timed_out = engine.generate(PROMPT, LONG, max_lag=1, running_timeout=3600)
        await until_idle(engine)
        assert engine.stats().running == 2
        closed.close()
        running = engine._serving()
        running._set_timer(running.open[timed_out.cell], "running", 0.0)  # the hour is over
        while not timed_out.done:
            await asyncio.sleep(0)
        with pytest.raises(errors.TimedOut):
            await timed_out
        await settle(engine)


async def test_an_idle_engine_notices_what_was_not_given_back(
    make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_engine() as engine:
        await engine.generate(PROMPT, SHORT)
        assert engine.stats().failed_checks == 0
        engine._core.scheduler.memory.pages.take(1)
        with caplog.at_level(logging.ERROR, "aioinfer"):
            async with asyncio.timeout(60):
                for times in range(3):
                    await engine.generate(PROMPT, SHORT)
                    while engine.stats().failed_checks <= times:
                        await asyncio.sleep(0)
        assert len(caplog.records) == 1, "once is enough"
        assert "belong to no request" in caplog.text
