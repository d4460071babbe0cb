"""Threads that end unasked: an engine says so at once, also when it is idle."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.engine import EngineState
from aioinfer.execution.device import DeviceLost
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.params import Grammar, SamplingParams
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.test_launchers import AsynchronousToy
from tests.tiers import SECONDS, rest
from tests.toys import ToyDevice, toy_generate

SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def kill(queue: Any) -> None:
    """The thread that waits at the queue cannot make anything of this."""
    queue.put(42)


async def test_a_launch_thread_that_dies_fails_an_idle_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    await engine.start()
    assert (await engine.generate([1], SHORT)).token_ids == toy_generate([1], SHORT)
    kill(engine._started().launcher._inbox)  # type: ignore[attr-defined]
    await until(lambda: not engine.ready)
    assert engine.state is EngineState.FAILED
    with pytest.raises(errors.EngineFailed, match="the launch thread ended") as caught:
        engine.generate([1])
    assert isinstance(caught.value.__cause__, DeviceLost)
    assert isinstance(caught.value.__cause__.__cause__, TypeError)
    await engine.aclose()
    assert engine.state is EngineState.CLOSED
    await engine.start()
    assert (await engine.generate([1], SHORT)).token_ids == toy_generate([1], SHORT)
    await engine.aclose()


async def test_a_launch_thread_that_dies_ends_every_stream(make_engine: MakeEngine, gate: Gate) -> None:
    engine = make_engine(fault=gate)
    await engine.start()
    streams = [engine.generate([number], LONG) for number in range(1, 12)]
    kill(engine._started().launcher._inbox)  # type: ignore[attr-defined]
    gate.release()
    async with asyncio.timeout(60):
        for stream in streams:
            with pytest.raises(errors.EngineFailed, match="the launch thread ended"):
                await stream
    await engine.aclose()


@rest(SECONDS)
@pytest.mark.parametrize("mode", ["thread", "inline"])
async def test_a_completion_thread_that_dies_fails_the_engine_and_closes_the_device(
    make_engine: MakeEngine, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = AsynchronousToy()
    engine = make_engine(device=device, launch_mode=mode)
    await engine.start()

    def die(self: Any, *flight: Any) -> None:
        raise SystemExit

    monkeypatch.setattr("aioinfer.execution.launcher._Poster.land", die)
    async with asyncio.timeout(60):
        with pytest.raises(errors.EngineFailed, match="the completion thread ended"):
            await engine.generate([1], SHORT)
        await engine.aclose()
    assert device.closed


async def test_an_engine_that_is_dropped_is_not_kept_by_its_threads(make_engine: MakeEngine) -> None:
    engine = make_engine()
    await engine.start()
    engine._started().driver.stop()
    launcher = engine._started().launcher
    thread = launcher._thread  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    del engine, launcher
    import gc

    gc.collect()
    await asyncio.to_thread(thread.join, 60)
    assert not thread.is_alive()


async def test_a_mask_thread_that_dies_fails_the_outputs_that_it_had(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = ToyDevice(num_slots=16)
    worker: Any = GrammarWorker(1.0)
    device.masks = worker
    accept = worker._accept
    deaths = [1]

    def die(batch: Any) -> Any:
        if deaths:
            deaths.clear()
            raise MemoryError
        return accept(batch)

    monkeypatch.setattr(worker, "_accept", die)
    constrained = SamplingParams(temperature=0, max_tokens=8, grammar=Grammar("regex", "[a-h]{8}"))
    async with make_engine(device=device) as engine, asyncio.timeout(60):
        free = engine.generate([1], SHORT)
        with pytest.raises(errors.StepFailed, match="the thread of its grammar ended: MemoryError"):
            await engine.generate([1, 2], constrained)
        assert (await free).token_ids == toy_generate([1], SHORT)
        assert len((await engine.generate([1, 2], constrained)).text) == 8
    worker.close()
