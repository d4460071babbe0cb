"""Launchers with an asynchronous device, which is what CUDA looks like from above."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from aioinfer.engine import Engine, EngineState
from aioinfer.errors import StepFailed
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step
from tests.engine.conftest import Gate, MakeEngine
from tests.joining import still_alive
from tests.tiers import SECONDS, grid, rest
from tests.toys import ToyDevice, toy_generate


class AsynchronousToy(ToyDevice):
    """The toy behind a queue: its launches return before they are computed, in order, by another thread."""

    synchronous = False

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._stream = ThreadPoolExecutor(1)
        self.in_flight = 0
        self.deepest = 0
        self.closed = False

    def launch(self, prepared: Any) -> Any:
        self.in_flight += 1
        self.deepest = max(self.deepest, self.in_flight)

        def compute() -> Any:
            result = super(AsynchronousToy, self).launch(prepared).wait()
            self.in_flight -= 1
            return result

        return SimpleNamespace(wait=self._stream.submit(compute).result)

    def close(self) -> None:
        self.closed = True
        self._stream.shutdown(wait=False)


@rest(SECONDS)
@pytest.mark.parametrize("mode", ["thread", "inline"])
@pytest.mark.parametrize("window", grid([1], [0, 2]))
async def test_an_asynchronous_device_gives_the_same_tokens(
    make_engine: MakeEngine, mode: str, window: int
) -> None:
    device, params = AsynchronousToy(), SamplingParams(temperature=0, max_tokens=30)
    async with make_engine(
        device=device, launch_mode=mode, max_running_requests=4, overlap_steps=window
    ) as engine:
        results = await asyncio.gather(*[_run(engine, [n, 3], params) for n in range(1, 10)])
    assert results == [toy_generate([n, 3], params) for n in range(1, 10)]
    assert device.deepest <= window + 1


@rest(SECONDS)
@pytest.mark.parametrize("mode", ["thread", "inline"])
async def test_a_step_that_fails_on_the_device_is_found_by_its_flight(
    make_engine: MakeEngine, mode: str
) -> None:
    def fault(step: Step) -> None:
        if step.id == 2:
            raise RuntimeError("late")

    device = AsynchronousToy(fault=fault)
    async with make_engine(device=device, launch_mode=mode, max_running_requests=4) as engine:
        with pytest.raises(StepFailed, match="late"):
            await engine.generate([1, 2], SamplingParams(max_tokens=9, ignore_eos=True))
        params = SamplingParams(temperature=0, max_tokens=5)
        assert await _run(engine, [4], params) == toy_generate([4], params)


async def hanging(engine: Engine, gate: Gate) -> Any:
    """A stream of an engine whose device does not get through with its first step."""
    await engine.start()
    stream = engine.generate([1, 2], SamplingParams(max_tokens=9))
    while not engine.stats().steps_in_flight:
        await asyncio.sleep(0)
    await asyncio.to_thread(gate.arrived.acquire)
    return stream


@rest(SECONDS)
@pytest.mark.parametrize("mode", ["thread", "inline"])
async def test_leaving_and_closing_wait_for_a_hanging_device_without_the_loop(
    make_engine: MakeEngine, mode: str, gate: Gate
) -> None:
    device = AsynchronousToy(fault=gate)
    engine = make_engine(device=device, launch_mode=mode)
    stream = await hanging(engine, gate)
    with pytest.raises(StopIteration):
        stream.aclose().send(None)  # returns before the loop gets a turn
    closing = asyncio.create_task(engine.aclose())
    for _ in range(10):
        await asyncio.sleep(0)
    assert not device.closed
    gate.release()
    await closing
    assert device.closed
    assert engine.state is EngineState.CLOSED


@rest(SECONDS)
@pytest.mark.parametrize("mode", ["thread", "inline"])
async def test_a_device_that_comes_to_rest_too_late_is_closed_when_it_does(
    make_engine: MakeEngine, mode: str, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    device = AsynchronousToy(fault=gate)
    engine = make_engine(device=device, launch_mode=mode)
    await hanging(engine, gate)
    inside = engine._started().launcher
    engine._started().driver.stop()
    assert not await inside.aclose(timeout=0.01)
    assert not await inside.aclose(timeout=0.01)
    assert "left behind" in caplog.text
    assert not device.closed
    gate.release()
    assert await inside.aclose()
    assert device.closed
    await engine.aclose()


@pytest.mark.parametrize("launcher", [ThreadLauncher, InlineLauncher])
async def test_a_launcher_that_is_dropped_leaves_no_thread(launcher: Any) -> None:
    before = set(threading.enumerate())
    made = launcher(AsynchronousToy(num_slots=4))
    await made.start()
    started = [
        thread for thread in set(threading.enumerate()) - before if thread.name.startswith("aioinfer-")
    ]
    assert started
    del made
    assert not await asyncio.to_thread(still_alive, started)


async def _run(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    return (await engine.generate(prompt, params)).token_ids


@pytest.mark.parametrize("window", [0, 1, 2])
async def test_the_device_goes_on_with_the_window_while_the_loop_stands_still(
    make_engine: Any, window: int
) -> None:
    gate = Gate()
    async with make_engine(overlap_steps=window, fault=gate) as engine:
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
        while engine.stats().steps_in_flight < window + 1:
            await asyncio.sleep(0)
        assert gate.arrived.acquire(timeout=60)
        gate.step(window + 1)
        # The loop's own thread waits here: nothing is planned, resolved or delivered.
        for _ in range(window):
            assert gate.arrived.acquire(timeout=60)
        assert engine.stats().steps_in_flight == window + 1
        gate.release()
        assert len((await stream).token_ids) == 30


async def test_a_question_that_follows_an_answer_is_in_the_next_step(make_engine: MakeEngine) -> None:
    """Steps that are computed on the loop's own thread leave it some turns for what they bring about."""
    steps: list[int] = []

    def fault(step: Step) -> None:
        if any([*row.sequence.prompt_ids] == [3] for row in step.prefilling):
            steps.append(step.id)

    async def ask() -> None:
        await engine.generate([3], SamplingParams(max_tokens=1))

    async with (
        make_engine(launch_mode="inline", overlap_steps=0, fault=fault) as engine,
        engine.generate([1, 2], SamplingParams(max_tokens=100, ignore_eos=True)) as other,
    ):
        await anext(other)
        for _ in range(5):
            await asyncio.create_task(ask())
    assert steps == [*range(steps[0], steps[0] + 5)]
