"""Outlets: what takes a stream's text without a task, by the cursors of ``async for``."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import StepFailed
from aioinfer.execution.launcher import InlineLauncher
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step
from aioinfer.stream import Outlet, Stream
from tests.tiers import SECONDS, rest
from tests.toys import ToyDevice, ToyTokenizer

PARAMS = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


class Taking:
    """An outlet and its lane: takes what there is whenever it is told, unless it is shut."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.text = ""
        self.told = 0
        self.shut = False

    @property
    def lane(self) -> Taking:
        return self

    def moved(self, outlets: Sequence[Outlet]) -> None:
        assert all(each is self for each in outlets)
        self.told += 1
        cell = self.stream.cell
        if self.shut:
            cell.blocked = True
            return
        pieces = cell.output.pieces
        self.text += "".join(pieces[cell.taken_pieces :])
        cell.taken_pieces, cell.taken_ids = len(pieces), len(cell.output.token_times)


def engine(fault: Any = None, **settings: Any) -> Engine:
    config = EngineConfig(model="toy", page_size=4, num_pages=256, **settings)
    device = ToyDevice(num_pages=256, num_slots=config.num_slots, fault=fault)
    return Engine(config, launcher=lambda _: InlineLauncher(device), tokenizer=lambda _: ToyTokenizer())


def is_parked(stream: Stream) -> bool:
    return stream.cell.parked


@rest(SECONDS)
@pytest.mark.parametrize("stop", [(), ("b", "ö")])
async def test_outlet_and_reader_have_the_whole_text_between_them(stop: tuple[str, ...]) -> None:
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop=stop)
    async with engine() as started:
        for number in range(1, 20):
            whole = await started.generate([number, 2], params)
            async with started.generate([number, 2], params) as stream:
                await stream.accepted()
                outlet = Taking(stream)
                await stream.until_ended(outlet)
                rest = [chunk async for chunk in stream]
                assert len(rest) == 1
                assert outlet.text + rest[0].text == whole.text
                assert rest[0].finish_reason == whole.finish_reason
                assert stream.cell.outlet is None
                if whole.finish_reason == "length":
                    assert outlet.told > 1


async def test_only_an_outlet_that_is_blocked_lags() -> None:
    async with engine(max_lag=4) as started:
        stream = started.generate([1, 2], PARAMS)
        await stream.accepted()
        outlet = Taking(stream)
        outlet.shut = True
        waiting = asyncio.create_task(stream.until_ended(outlet))
        async with asyncio.timeout(60):
            while not is_parked(stream):
                await asyncio.sleep(0)
        steps = started.stats().steps
        for _ in range(20):
            await asyncio.sleep(0)
        assert started.stats().steps == steps
        outlet.shut = False
        stream.cell.blocked = False
        outlet.moved((outlet,))
        stream.caught_up()
        await waiting
        assert not is_parked(stream)
        assert outlet.text.startswith(stream.result().text[:20])
        # One that takes all at once is never parked, however little it may lag.
        assert len((await started.generate([1, 2], PARAMS)).text) == len(stream.result().text)
        await stream.aclose()


async def test_a_cancelled_wait_aborts_the_request() -> None:
    async with engine() as started:
        stream = started.generate([1, 2], SamplingParams(max_tokens=900, ignore_eos=True))
        await stream.accepted()
        waiting = asyncio.create_task(stream.until_ended(Taking(stream)))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task"):
            await stream.until_ended(Taking(stream))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert stream.done
        assert stream.cell.outlet is None


async def test_errors_come_behind_the_text_that_was_taken() -> None:
    def fault(step: Step) -> None:
        if step.id == 6:
            raise ArithmeticError("on purpose")

    async with engine(fault) as started:
        stream = started.generate([1, 2], PARAMS)
        await stream.accepted()
        outlet = Taking(stream)
        await stream.until_ended(outlet)
        assert outlet.text
        with pytest.raises(StepFailed):
            async for chunk in stream:
                outlet.text += chunk.text
        assert outlet.text == stream.result().text
