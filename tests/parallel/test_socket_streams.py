"""Streams of an engine behind a socket, and how they are parked, closed and given away."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from aioinfer import Pooling, SamplingParams, errors
from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError, EngineFailed
from aioinfer.parallel.replica import ReplicaState
from aioinfer.params import Grammar
from tests.parallel.served import PARAMS, Served, Told, dispatching, toy
from tests.parallel.waiting import until
from tests.tiers import SECONDS, rest
from tests.toys.pooling import toy_pooled

# -- streams -------------------------------------------------------------------------------------------


async def test_a_stream_through_a_socket_is_that_of_the_engine(tmp_path: Path) -> None:
    async with toy() as alone:
        expected = await alone.generate([1, 2, 3, 4, 5], PARAMS)
    async with dispatching(tmp_path, toy()) as dispatcher:
        result = await dispatcher.generate([1, 2, 3, 4, 5], PARAMS, request_id="mine")
        unscored = dataclasses.replace(PARAMS, prompt_logprobs=None)
        chunks = [chunk async for chunk in dispatcher.generate([1, 2, 3, 4, 5], unscored)]
    assert result == expected
    assert "".join(chunk.text for chunk in chunks) == expected.text
    assert [each for chunk in chunks for each in chunk.token_ids] == expected.token_ids
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.cached_tokens == 4  # of the first one's prompt
    assert result.request_id == "mine"
    assert result.metrics is not None
    times = [result.metrics.arrival, result.metrics.admitted, *result.metrics.token_times]
    assert times == sorted(times)  # type: ignore[type-var]


async def test_what_a_request_leaves_open_is_not_taken_from_the_replicas_model(tmp_path: Path) -> None:
    """The dispatcher has taken its own by then: a value that equals the default was given."""
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=1)
    async with toy() as alone:
        expected = await alone.generate([1, 2], params)
    async with dispatching(tmp_path, toy(waiting_timeout=1e-6, max_lag=1)) as dispatcher:
        engine = dispatcher.replicas[0].engine
        engine.default_params = SamplingParams(temperature=0.0)
        dispatcher.config = EngineConfig(model="toy")
        assert await dispatcher.generate([1, 2], params) == expected


async def test_an_engine_that_is_lost_says_so(tmp_path: Path) -> None:
    async with dispatching(tmp_path, toy(0.001)) as dispatcher:
        stream = dispatcher.generate([1, 2, 3], PARAMS)
        await anext(stream)
        runtime: Any = dispatcher.replicas[0].engine._runtime
        runtime.lost(RuntimeError("it fell off the bus"))
        with pytest.raises(EngineFailed, match="it fell off the bus"):
            await stream


async def test_a_request_that_the_replica_refuses_fails_alone(tmp_path: Path) -> None:
    async with dispatching(tmp_path, toy(0.001)) as dispatcher:
        other = dispatcher.generate([1, 2, 3], PARAMS)
        with pytest.raises(errors.InvalidRequest) as caught:
            # The dispatcher sees that it is one, and only a grammar compiler that it is wrong.
            await dispatcher.generate([1], SamplingParams(grammar=Grammar("regex", "("), seed=1))
        assert caught.value.field
        assert len((await other).token_ids) == 60


async def test_the_first_step_of_a_request_is_told_before_it_brings_anything(tmp_path: Path) -> None:
    """From then on the running timeout counts."""
    async with dispatching(tmp_path, toy(600.0)) as dispatcher:
        stream = dispatcher.generate([1, 2, 3], SamplingParams(seed=1, max_tokens=1))
        await until(lambda: stream.admitted)
        assert not stream.usage.completion_tokens
        stream.close()


# -- readers -------------------------------------------------------------------------------------------


async def test_a_reader_that_lags_parks_its_request_in_the_replica(tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=200, seed=1, ignore_eos=True)
    async with toy() as alone:
        expected = await alone.generate([1, 2, 3], params)
    async with dispatching(tmp_path, toy()) as dispatcher:
        engine = dispatcher.replicas[0].engine
        stream = dispatcher.generate([1, 2, 3], params, max_lag=10)
        ids: list[int] = []
        while len(ids) < 200:
            parkings = engine.stats().parkings
            await until(lambda before=parkings: stream.done or engine.stats().parkings > before)
            await until(lambda: stream.done or not engine.stats().steps_in_flight)
            # Half of the lag may have been read without a word, and some steps were in flight.
            assert len(ids) + 10 - 5 <= stream.usage.completion_tokens <= len(ids) + 10 + 4 or stream.done
            ids += (await anext(stream)).token_ids
        assert ids == expected.token_ids
        assert engine.stats().parkings > 5


@rest(SECONDS)
async def test_a_reader_of_some_of_it_is_never_forgotten(tmp_path: Path) -> None:
    """Also one that reads less at a time than what the replica is told at once."""
    params = SamplingParams(max_tokens=120, seed=1, ignore_eos=True)
    async with dispatching(tmp_path, toy(0.0005)) as dispatcher:
        for lag in (1, 2, 3, 7):
            stream = dispatcher.generate([1, 2, lag], params, max_lag=lag)
            async with asyncio.timeout(60):
                count = 0
                async for chunk in stream:
                    count += len(chunk.token_ids)
                    await asyncio.sleep(0.002)
            assert count == 120


# -- the rest ------------------------------------------------------------------------------------------


@rest(SECONDS)
async def test_pausing_and_flushing_reach_the_engine(tmp_path: Path) -> None:
    async with dispatching(tmp_path, toy(0.001)) as dispatcher:
        engine = dispatcher.replicas[0].engine
        stream = dispatcher.generate([1, 2, 3, 4, 5, 6], PARAMS)
        await anext(stream)
        await dispatcher.pause()
        assert engine.stats().paused
        assert not engine.stats().steps_in_flight
        dispatcher.resume()
        await stream
        await until(lambda: dispatcher.stats().pages_evictable)
        known = dispatcher.stats().pages_evictable
        assert known == engine.stats().pages_evictable
        assert dispatcher.flush_cache() == known
        await until(lambda: not engine.stats().pages_evictable)


async def test_a_replica_that_is_left_by_its_dispatcher_goes_on_computing(served: Served) -> None:
    """Also where the dispatcher had paused it."""
    await served.launch()
    await served.start(Told())
    await served.pause()
    assert served.engine.stats().paused
    await served._disconnect()
    await until(lambda: not served.engine.stats().paused)


async def test_a_replica_that_leaves_gives_its_streams_away(tmp_path: Path) -> None:
    async with toy() as alone:
        expected = await alone.generate([1, 2, 3], PARAMS)
    async with dispatching(tmp_path, toy(0.001), toy(0.001)) as dispatcher:
        stream = dispatcher.generate([1, 2, 3], PARAMS)
        await anext(stream)
        (replica,) = [each for each in dispatcher.replicas if each.load.requests]
        await replica.agent.drain()
        assert replica.state is ReplicaState.DRAINING
        assert (await stream).token_ids == expected.token_ids
        assert dispatcher.stats().resumed == 1
        with pytest.raises(ConfigError, match="the engine of this replica is running"):
            await replica.launch()


@pytest.mark.parametrize("pooling", [Pooling("last"), Pooling("tokens"), Pooling("choices", (3, 4))])
async def test_hidden_states_cross_the_socket_bit_by_bit(tmp_path: Path, pooling: Pooling) -> None:
    prompts = [[*range(1, 2 + index)] for index in range(12)]
    async with dispatching(tmp_path, toy(), toy()) as dispatcher:
        streams = [dispatcher.generate(ids, pooling=pooling) for ids in prompts]
        for ids, stream in zip(prompts, streams, strict=True):
            result = await stream
            wanted = toy_pooled(ids, pooling)
            assert (result.pooled.dtype, result.pooled.shape) == (wanted.dtype, wanted.shape)
            assert (result.pooled == wanted).all()
            assert (result.token_ids, result.finish_reason) == ([], "length")
