"""Request metrics have the resolution of the system's clock on every loop, and stay exact in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
import uvloop

from aioinfer.engine import Engine
from aioinfer.loop.clock import clock_of
from aioinfer.outputs import RequestMetrics
from aioinfer.params import SamplingParams
from aioinfer.testing import VirtualLoop
from tests.engine.conftest import MakeEngine
from tests.engine.test_pacing import engine_of

PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def metrics(engine: Engine, make_loop: Callable[[], asyncio.AbstractEventLoop]) -> RequestMetrics:
    async def ask() -> RequestMetrics:
        async with engine:
            found = (await engine.generate([1, 2, 3], PARAMS)).metrics
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
