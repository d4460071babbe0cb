"""Streams on another loop than the engine's: reading is refused there, and leaving ends the request."""

from __future__ import annotations

import asyncio
import copy
import pickle
import threading
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.engine import Engine
from aioinfer.params import SamplingParams
from aioinfer.stream import Stream
from tests.engine.conftest import Gate, MakeEngine
from tests.engine.simulation import settle
from tests.toys import ToyTokenizer, toy_generate

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPT = [1, 2, 3]


def elsewhere(call: Callable[[], Awaitable[Any]]) -> Any:
    """Run it in a loop of another thread, while this thread and its loop stand still; what it raised."""
    raised: list[BaseException | None] = []

    async def run() -> None:
        try:
            await call()
        except Exception as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    thread.join()
    return raised[0]


async def enter(stream: Stream) -> None:
    async with stream:
        pass


async def iterate(stream: Stream) -> None:
    async for _ in stream:
        pass


async def wait(stream: Stream) -> None:
    await stream


@pytest.mark.parametrize("use", [enter, iterate, wait, Stream.accepted])
@pytest.mark.parametrize("prompt", [PROMPT, "text"])
async def test_a_stream_cannot_be_read_on_another_loop(
    make_engine: MakeEngine, use: Callable[[Stream], Awaitable[Any]], prompt: Any
) -> None:
    async with make_engine() as engine:
        stream = engine.generate(prompt, SHORT)
        assert isinstance(elsewhere(lambda: use(stream)), errors.WrongLoop)
        assert not stream.done
        ids = prompt if isinstance(prompt, list) else ToyTokenizer().encode(prompt)
        assert (await stream).token_ids == toy_generate(ids, SHORT)


async def close(stream: Stream) -> None:
    stream.close()


async def throw(stream: Stream) -> None:
    """As a task does that is cancelled before it begins."""
    with pytest.raises(asyncio.CancelledError):
        stream.throw(asyncio.CancelledError())


async def leave_block(stream: Stream) -> None:
    await stream.__aexit__(None, None, None)


@pytest.mark.parametrize("leave", [Stream.aclose, close, throw, leave_block])
@pytest.mark.parametrize("read", [False, True])
async def test_a_stream_left_on_another_loop_ends_in_the_next_turn_of_its_own(
    make_engine: MakeEngine, gate: Gate, leave: Callable[[Stream], Awaitable[Any]], read: bool
) -> None:
    async with make_engine(fault=gate) as engine:
        stream, other = engine.generate(PROMPT, LONG), engine.generate(PROMPT, SHORT)
        reader = asyncio.create_task(anext(stream))
        await asyncio.to_thread(gate.arrived.acquire)
        unfinished = len(list(engine._core.scheduler.queues.unfinished()))
        if not read:
            gate.step(3)
            await reader
        assert elsewhere(lambda: leave(stream)) is None
        assert stream.done
        # Nothing of the scheduler's was changed on the other thread.
        assert len(list(engine._core.scheduler.queues.unfinished())) == unfinished == 2
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(list(engine._core.scheduler.queues.unfinished())) == 1
        if read:
            with pytest.raises(errors.Cancelled):
                await reader
        assert [chunk async for chunk in stream] == []
        gate.release()
        assert (await other).token_ids == toy_generate(PROMPT, SHORT)
        await settle(engine)


async def test_a_reader_that_is_collected_amid_planning_ends_its_request_later(
    make_engine: MakeEngine,
) -> None:
    """A coroutine is closed where the collector finds it."""
    held: list[Any] = []

    async with make_engine() as engine:
        scheduler: Any = type(engine._core.scheduler)
        plan = scheduler.plan
        stream = engine.generate(PROMPT, LONG)
        other = engine.generate(PROMPT, SHORT)
        reading = stream.__anext__()
        reading.send(None)
        held.append(reading)
        del reading
        found: list[tuple[bool, bool]] = []

        def planning(self: Any) -> Any:
            if held:
                held.clear()
                found.append((stream.done, stream.cell.output.ended))
            return plan(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(scheduler, "plan", planning)
            assert (await other).token_ids == toy_generate(PROMPT, SHORT)
        assert found == [(True, False)], "the request ended amid a plan"
        assert stream.cell.output.ended
        await settle(engine)


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"]
)
async def test_a_stream_is_not_copied(make_engine: MakeEngine, duplicate: Callable[[Stream], Any]) -> None:
    async with make_engine() as engine:
        stream = engine.generate(PROMPT, SHORT)
        with pytest.raises(TypeError, match="Stream cannot be copied"):
            duplicate(stream)
        assert (await stream).token_ids == toy_generate(PROMPT, SHORT)


async def test_a_stream_left_when_its_loop_is_gone_is_no_error(make_engine: MakeEngine) -> None:
    left: list[Stream] = []

    async def begin(engine: Engine) -> None:
        await engine.start()
        left.append(engine.generate(PROMPT, LONG))

    engine = make_engine()
    assert elsewhere(lambda: begin(engine)) is None
    left[0].close()
    assert left.pop().done
    await engine.aclose()
