"""Requests whose text is behind their tokens: faults end what they concern, and no text is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.loop import driver
from aioinfer.loop.driver import Driver
from aioinfer.loop.runtime import Runtime
from aioinfer.loop.texts import Texts
from aioinfer.params import SamplingParams
from aioinfer.scheduling.queues import RequestQueues
from aioinfer.scheduling.scheduler import Scheduler
from aioinfer.scheduling.sequence import ParkedFor, Sequence
from aioinfer.scheduling.step import Outcome, Step
from tests.engine.conftest import MakeEngine
from tests.engine.simulation import settle
from tests.sequences import sequence_of
from tests.toys import ToyTokenizer, toy_generate

PROMPT = [1, 2, 3]
FREE = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
#: tokens of PROMPT's answer
IDS = toy_generate(PROMPT, FREE)


class Injected(RuntimeError):
    pass


def searched(pattern: str = "zzzz", **options: Any) -> SamplingParams:
    """With a pattern, whose search may take long."""
    given = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, **options}
    return SamplingParams(stop_regex=pattern, **given)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Whether texts stay behind."""
    held, catch_up = True, Texts.catch_up
    monkeypatch.setattr(Texts, "catch_up", lambda *given: [] if held else catch_up(*given))

    def hold(now: bool) -> None:
        nonlocal held
        held = now

    return hold


@pytest.mark.parametrize("where", ["device", "commit"])
@pytest.mark.parametrize("end", ["error", "pattern", "token"])
async def test_the_error_of_a_step_comes_behind_the_text_before_it_and_not_behind_a_stop(
    make_engine: MakeEngine,
    monkeypatch: pytest.MonkeyPatch,
    hold: Callable[[bool], None],
    end: str,
    where: str,
) -> None:
    """Whether a request fails does not depend on how late its text is."""
    resolve, faults = Scheduler.resolve, list[str]()

    def fault(step: Step, at: str = "device") -> None:
        if step.id == 3 and where == at:
            faults.append(at)
            raise Injected("broken")

    def committing(self: Scheduler, step: Step, outcome: Outcome) -> list[Sequence]:
        fault(step, "commit")
        return resolve(self, step, outcome)

    monkeypatch.setattr(Scheduler, "resolve", committing)
    first = ToyTokenizer().decode(IDS[:1])
    stops: dict[str, Any] = {"stop_token_ids": (IDS[1],)} if end == "token" else {}
    params = searched(first if end == "pattern" else "zzzz", **stops)
    async with make_engine(fault=fault, overlap_steps=2, plan_late=False) as engine:
        stream = engine.generate(PROMPT, params)
        request = sequence_of(stream)
        async with asyncio.timeout(60):
            while not request.finished or engine.stats().steps_in_flight:
                await asyncio.sleep(0)
        assert faults == [where]
        assert not stream.done
        hold(False)
        if end == "error":
            assert (await anext(stream)).token_ids == IDS[:2]
            with pytest.raises(errors.StepFailed) as failed:
                await anext(stream)
            assert isinstance(failed.value.__cause__, Injected)
        else:
            result = await stream
            wanted = ("", IDS[:1], first) if end == "pattern" else (first, IDS[:2], IDS[1])
            assert (result.text, result.token_ids, result.stop_reason) == wanted
            assert result.finish_reason == "stop"
        await settle(engine)


@pytest.mark.parametrize("window", [0, 2])
async def test_a_reader_does_not_make_an_engine_compute_ahead_of_the_text(
    make_engine: MakeEngine, hold: Callable[[bool], None], window: int
) -> None:
    """What waits for its text goes on with its text, whoever reads."""
    async with make_engine(overlap_steps=window) as engine:
        stream = engine.generate(PROMPT, searched())
        request = sequence_of(stream)
        async with asyncio.timeout(60):
            while not request.parked or engine.stats().steps_in_flight:
                await asyncio.sleep(0)
        steps = engine.stats().steps
        reading = asyncio.ensure_future(anext(stream))
        for _ in range(50):
            await asyncio.sleep(0)
        assert request.parked_for == {ParkedFor.TEXT}
        assert (engine.stats().steps, engine.stats().steps_in_flight) == (steps, 0)
        hold(False)
        ids = (await reading).token_ids
        async for chunk in stream:
            ids += chunk.token_ids
        assert ids == IDS
        await settle(engine)


async def test_a_request_that_cannot_go_on_when_its_text_has_caught_up_fails_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, hold: Callable[[bool], None]
) -> None:
    unpark = RequestQueues.unpark

    def fault(queues: RequestQueues, request: Sequence, waits: Any) -> None:
        if request is victim and waits is ParkedFor.TEXT and not request.finished:
            raise Injected("no way back")
        unpark(queues, request, waits)

    async with make_engine() as engine:
        streams = [engine.generate(PROMPT, searched()) for _ in range(3)]
        victim = sequence_of(streams[1])
        async with asyncio.timeout(60):
            while not all(sequence_of(stream).parked for stream in streams):
                await asyncio.sleep(0)
        monkeypatch.setattr(RequestQueues, "unpark", fault)
        hold(False)
        with pytest.raises(errors.StepFailed, match="no way back") as failed:
            await streams[1]
        assert isinstance(failed.value.__cause__, Injected)
        assert [(await streams[at]).token_ids for at in (0, 2)] == [IDS, IDS]
        assert engine.ready
        await settle(engine)


async def test_a_request_that_cannot_go_on_when_it_is_read_fails_alone(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(*given: Any) -> None:
        raise Injected("no way back")

    async with make_engine() as engine:
        stream = engine.generate(PROMPT, FREE, max_lag=4)
        other = engine.generate(PROMPT, FREE)
        async with asyncio.timeout(60):
            while not sequence_of(stream).parked or sequence_of(stream).pending:
                await asyncio.sleep(0)
        with monkeypatch.context() as patch:
            patch.setattr(RequestQueues, "unpark", fault)
            assert (await anext(stream)).token_ids == IDS[: stream.usage.completion_tokens]
        with pytest.raises(errors.StepFailed, match="could not go on: no way back") as failed:
            await anext(stream)
        assert isinstance(failed.value.__cause__, Injected)
        assert (await other).token_ids == IDS
        assert engine.ready
        await settle(engine)


@pytest.mark.parametrize("max_tokens", [5, 60])
async def test_a_fault_in_reporting_a_text_that_has_caught_up_costs_its_request_only(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    catch_up, updated = Driver._catch_up, Runtime.updated
    catching_up, faults = False, 0

    def marked(self: Driver) -> None:
        nonlocal catching_up
        catching_up = True
        try:
            catch_up(self)
        finally:
            catching_up = False

    def fault(self: Runtime, request: Sequence) -> None:
        nonlocal faults
        if catching_up and request is victim and not faults:
            faults += 1
            raise Injected("no report")
        updated(self, request)

    monkeypatch.setattr(driver, "_SEARCHING", 0.0)
    monkeypatch.setattr(Driver, "_catch_up", marked)
    monkeypatch.setattr(Runtime, "updated", fault)
    async with make_engine() as engine:
        streams = [engine.generate(PROMPT, searched(max_tokens=max_tokens)) for _ in range(4)]
        victim = sequence_of(streams[2])
        results = await asyncio.gather(*streams, return_exceptions=True)
        assert faults == 1
        assert engine.ready
        await settle(engine)
    failed = results.pop(2)
    if isinstance(failed, BaseException):  # its output was not complete yet
        assert isinstance(failed, errors.StepFailed)
        assert isinstance(failed.__cause__, Injected)
    else:
        results.append(failed)
    for result in results:
        assert not isinstance(result, BaseException)
        assert result.token_ids == IDS[:max_tokens]


async def test_a_policy_that_does_not_queue_a_request_fails_that_one(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_engine() as engine:
        running = engine.generate(PROMPT, FREE)
        await anext(running)
        waiting = engine._core.scheduler.queues.waiting

        def fault(request: Sequence) -> None:
            raise Injected("not this one")

        with monkeypatch.context() as patch:
            patch.setattr(type(waiting), "add", lambda self, request: fault(request))
            with pytest.raises(errors.StepFailed, match=r"could not be queued: .*not this one"):
                engine.generate(PROMPT, FREE)
            with pytest.raises(errors.StepFailed, match=r"could not be queued: .*not this one"):
                await engine.generate("text", FREE)
        assert "could not be queued" in caplog.text
        assert engine.stats().waiting == engine.stats().arriving == engine.stats().shelved == 0
        assert engine._core.scheduler.queues.queued_tokens == 0
        assert (await engine.generate(PROMPT, FREE)).token_ids == IDS
        assert (await running).token_ids == IDS
        await settle(engine)
