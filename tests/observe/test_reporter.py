"""The log line: rates since the last one, silent while idle, on a timer and nothing else."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import pytest

from aioinfer import SamplingParams
from aioinfer.observe.reporter import Reporter, line
from aioinfer.testing import VirtualLoop
from tests.observe.scrapes import toy_engine

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record for record in caplog.records if record.name == "aioinfer.stats"]
    assert {record.levelno for record in found} <= {logging.INFO}
    return [record.getMessage() for record in found]


def test_lines_come_by_the_clock_and_stop_while_idle(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aioinfer.stats")

    async def main() -> None:
        async with toy_engine(stats_interval=10.0, launch_mode="inline") as engine:
            await asyncio.sleep(9.9)
            assert not lines(caplog)
            await asyncio.sleep(0.2)
            assert [text.endswith(", idle") for text in lines(caplog)] == [True]
            await asyncio.sleep(1000)
            assert len(lines(caplog)) == 1
            await engine.generate([1, 2, 3, 4, 5], PARAMS)
            await asyncio.sleep(10)
            assert len(lines(caplog)) == 2
            assert "prompt 0.5 tok/s, output 0.6 tok/s, running 0, waiting 0, KV 0.0 %" in lines(caplog)[1]
            assert "idle" not in lines(caplog)[1]
            await asyncio.sleep(1000)
            assert [text.endswith(", idle") for text in lines(caplog)] == [True, False, True]
        await asyncio.sleep(1000)
        assert len(lines(caplog)) == 3, "a closed engine says nothing"

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


async def test_without_an_interval_there_is_no_timer(caplog: pytest.LogCaptureFixture) -> None:
    for interval in (None, 0.0):
        async with toy_engine(stats_interval=interval) as engine:
            assert engine._serving().observers.find(Reporter) is None
    async with toy_engine(stats_interval=1000.0):
        assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not lines(caplog)


async def test_a_line_has_what_happened_since_the_last_one() -> None:
    async with toy_engine() as engine:
        before = engine.stats()
    after = dataclasses.replace(
        before, prefill_tokens=200, output_tokens=50, running=3, waiting=2, arriving=1, pages_total=64,
        pages_free=32, pages_evictable=16, queried_tokens=400, cached_tokens=100, loop_lag=0.0025,
    )  # fmt: skip
    assert line(before, after, 2.0) == (
        "prompt 100.0 tok/s, output 25.0 tok/s, running 3, waiting 3, KV 25.0 %, cache hits 25.0 %, "
        "loop lag 2.50 ms"
    )
    assert "cache hits -" in line(after, after, 2.0)


async def test_a_stalled_engine_is_not_idle(caplog: pytest.LogCaptureFixture) -> None:
    """Requests that wait without progress are reported again and again."""
    caplog.set_level(logging.INFO, "aioinfer.stats")
    async with toy_engine(stats_interval=0.001) as engine:
        await engine.pause()
        stream = engine.generate([1, 2, 3], PARAMS)
        while sum("waiting 1" in text for text in lines(caplog)) < 3:
            await asyncio.sleep(0.001)
        stream.close()
        engine.resume()
