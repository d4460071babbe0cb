"""The pace at which steps are planned, and the clock of request metrics."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.loop.clock import clock_of
from aioinfer.loop.pacing import Pace
from aioinfer.outputs import RequestMetrics
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step
from aioinfer.testing import TimedLauncher, VirtualLoop
from tests.engine.conftest import MakeEngine
from tests.toys import ToyDevice

STEP = 0.1


def run(main: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class Watched(TimedLauncher):
    """Counts the steps for which the device had to wait, having computed all that it had been given."""

    waits = 0

    def launch(self, step: Step, landed: Any) -> Any:
        self.waits += asyncio.get_running_loop().time() >= self._free_at
        return super().launch(step, landed)


def engine_of(step_time: Any, **settings: Any) -> tuple[Engine, Watched]:
    # Without a tokenizer: text that waits for its rest would make tokens late.
    config = EngineConfig(
        model="toy", page_size=4, num_pages=400, max_running_requests=8, speculation="off", **settings
    )
    device = ToyDevice(num_pages=400, page_size=4, num_slots=config.num_slots)
    launcher = Watched(device, step_time)
    return Engine(config, launcher=lambda _: launcher, tokenizer=lambda _: None), launcher


async def course(step_time: Any, **settings: Any) -> tuple[list[float], int]:
    """TTFTs of requests that come while another decodes, and how often the device waited."""
    engine, launcher = engine_of(step_time, **settings)
    loop, dice = asyncio.get_running_loop(), random.Random(5)
    times: list[float] = []
    async with engine:
        long = engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
        await long.accepted()
        for at in range(12):
            await asyncio.sleep(dice.uniform(4, 9) * STEP)
            begin = loop.time()
            short = engine.generate([at, 7, 8], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
            await anext(short)
            times.append(loop.time() - begin)
            await short
        await long
        return times, launcher.waits


@pytest.mark.parametrize("window", [1, 2])
def test_who_arrives_during_a_step_is_in_the_next_one(window: int) -> None:
    late, waits_late = run(course(lambda _: STEP, overlap_steps=window))
    early, waits_early = run(course(lambda _: STEP, overlap_steps=window, plan_late=False))
    # What is left of the step under way, those behind it, and one's own: a step less than before.
    assert max(late) < (window + 1.1) * STEP
    assert sum(early) / len(early) - sum(late) / len(late) > 0.8 * STEP
    # For its first step, and never again.
    assert waits_late == waits_early == 1


def test_a_device_whose_steps_get_shorter_waits_once_for_each_size() -> None:
    jumps = 0

    def step_time(step: Step) -> float:
        nonlocal jumps
        jumps += step.id % 60 == 0 and step.id > 0
        return STEP * (1 + (step.id // 30) % 2)

    _, waits = run(course(step_time, overlap_steps=1))
    sizes = 2  # decodes alone, and beside a prompt
    assert 1 < waits <= 1 + jumps * sizes


def some(tokens: int = 4, *, prefill: bool = False, blocks: bool = False) -> Any:
    """A step, as far as a pace looks at it."""
    multi_step = object() if blocks else None
    return SimpleNamespace(num_tokens=tokens, prefill_tokens=tokens * prefill, multi_step=multi_step)


def test_sizes_that_did_not_occur_and_blocks_are_planned_at_once() -> None:
    pace = Pace()
    pace.landed(some(), launched=0.0, now=1.0, delay=0.0)
    assert pace.spare(some(), launched=1.0, now=1.0) > 0.9
    for other in (some(tokens=9), some(prefill=True), some(blocks=True)):
        assert pace.spare(other, launched=1.0, now=1.0) <= 0


def test_a_loop_that_is_late_gets_its_steps_planned_earlier_until_it_is_not() -> None:
    pace = Pace()
    pace.landed(some(), launched=0.0, now=0.1, delay=0.0)
    pace.landed(some(), launched=1.0, now=1.14, delay=0.04)
    assert pace.spare(some(), launched=2.0, now=2.0) == pytest.approx(0.1 - 0.005 - 0.08)
    for at in range(2, 60):
        pace.landed(some(), launched=at, now=at + 0.1, delay=0.0)
    assert pace.spare(some(), launched=60, now=60) > 0.08


# -- the clock that request metrics are of -------------------------------------------------------------------

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def metrics(engine: Engine, make_loop: Callable[[], asyncio.AbstractEventLoop]) -> RequestMetrics:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)

    async def ask() -> RequestMetrics:
        async with engine:
            found = (await engine.generate([1, 2, 3], params)).metrics
            assert found is not None
            return found

    with asyncio.Runner(loop_factory=make_loop) as runner:
        return runner.run(ask())


def all_times(found: RequestMetrics) -> list[float]:
    assert found.admitted is not None
    assert found.finished is not None
    return [found.arrival, found.admitted, *found.token_times, found.finished]


@pytest.mark.parametrize("loop", LOOPS)
def test_request_metrics_resolve_a_microsecond(make_engine: MakeEngine, loop: str) -> None:
    before = time.monotonic()
    found = all_times(metrics(make_engine(), LOOPS[loop]))
    after = time.monotonic()
    assert before < found[0] < found[1] < found[2], "a step is too short for the clock"
    assert found == sorted(found)
    assert found[-1] < after
    whole = [at for at in found if abs(1e3 * at - round(1e3 * at)) < 1e-4]
    assert len(whole) < len(found) / 2, f"whole milliseconds: {whole}"


def test_request_metrics_are_exact_in_virtual_time() -> None:
    found = metrics(engine_of(lambda _: 0.25, overlap_steps=0)[0], VirtualLoop)
    assert found.arrival == found.admitted == 0.0
    assert found.token_times == tuple(0.25 * count for count in range(1, 13))
    assert found.finished == 3.0


class Slowed(asyncio.SelectorEventLoop):
    """A loop of some other library, with a time of its own."""

    def time(self) -> float:
        return super().time() / 10


def test_a_loop_with_a_time_of_its_own_is_asked() -> None:
    loop = Slowed()
    assert clock_of(loop) == loop.time
    loop.close()


async def gap_beside(prompts: list[list[int]], target: float, window: int) -> tuple[float, list[list[int]]]:
    """The longest gap of a stream from the first of these prompts to the last, and all tokens."""

    def step_time(step: Step) -> float:
        return 0.01 + 0.002 * step.num_tokens

    engine, _ = engine_of(step_time, overlap_steps=window, itl_target=target)
    async with engine:
        long = engine.generate([1, 2, 3], SamplingParams(temperature=0, max_tokens=150, ignore_eos=True))
        await anext(long)
        few = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        results = await asyncio.gather(*[engine.generate(prompt, few) for prompt in prompts])
        results.append(await long)
    assert results[-1].metrics is not None
    gaps = [after - before for before, after in itertools.pairwise(results[-1].metrics.token_times)]
    return max(gaps), [each.token_ids for each in results]


@pytest.mark.parametrize("window", [0, 1, 2])
def test_a_stream_waits_no_longer_for_prompts_than_a_step_may_take(window: int) -> None:
    prompts = [[at, *range(50), *range(50 + at)] for at in range(4)]
    unbounded, tokens = run(gap_beside(prompts, 0.0, window))
    assert unbounded > 0.5
    for target in (0.1, 0.05, 0.001):
        bounded, same = run(gap_beside(prompts, target, window))
        assert bounded < 1.1 * max(target, 0.03)  # eight tokens of a prompt at least
        assert same == tokens
