"""The engine's own life: starting, draining, closing, failing, and whose loop it is."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine, EngineState
from aioinfer.execution.device import DeviceLost
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import Step
from tests.engine.conftest import Gate, MakeEngine, OwnThreads
from tests.joining import still_alive
from tests.tiers import PROGRAM, nightly
from tests.toys import ToyDevice, ToyTokenizer, toy_generate

LONG = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPT = [1, 2, 3]


async def test_closing_leaves_no_thread_and_no_task(make_engine: MakeEngine, own_threads: OwnThreads) -> None:
    before = asyncio.all_tasks()
    async with make_engine() as engine:
        await asyncio.gather(*(engine.generate("hello", SHORT) for _ in range(8)))
        threads = own_threads.threads()
        assert "aioinfer-launch" in own_threads()
        assert any(thread.name.startswith("aioinfer-text") for thread in threads)
    assert [name for name in own_threads() if "text" not in name] == []
    assert not await asyncio.to_thread(still_alive, threads)
    assert asyncio.all_tasks() == before


LOOP = """
import asyncio, threading
from aioinfer import Engine, EngineConfig

def forever(*given, **named):
    begun.set()
    while True:
        pass

async def main():
    engine = Engine(EngineConfig(model="tiny-chat", threads=1, num_pages=64, attention_backend="sdpa"))
    await engine.start()
    engine.tokenizer.render_chat = forever
    stream = engine.generate([{"role": "user", "content": "x"}])
    await asyncio.to_thread(begun.wait)
    await engine.aclose()
    print("closed", flush=True)

begun = threading.Event()
asyncio.run(main())
"""


@nightly(PROGRAM)
def test_a_chat_template_that_loops_does_not_keep_the_process() -> None:
    ended = subprocess.run([sys.executable, "-c", LOOP], capture_output=True, text=True, timeout=240)
    assert (ended.stdout, ended.returncode) == ("closed\n", 0), ended.stderr


async def test_a_new_or_closed_engine_refuses_requests(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(errors.EngineClosed):
        engine.generate(PROMPT)
    await engine.start()
    with pytest.raises(errors.EngineError, match="running"):
        await engine.start()
    await engine.aclose()
    await engine.aclose()
    with pytest.raises(errors.EngineClosed):
        engine.generate(PROMPT)


def test_an_engine_can_be_used_in_a_second_run(make_engine: MakeEngine) -> None:
    engine = make_engine()

    async def use() -> list[int]:
        async with engine:
            return (await engine.generate(PROMPT, SHORT)).token_ids

    assert asyncio.run(use()) == asyncio.run(use()) == toy_generate(PROMPT, SHORT)


def test_an_engine_whose_loop_died_can_be_started_again(
    make_engine: MakeEngine, own_threads: OwnThreads
) -> None:
    engine = make_engine()

    async def forget_to_close() -> None:
        await engine.start()

    async def use() -> list[int]:
        async with engine:
            return (await engine.generate(PROMPT, SHORT)).token_ids

    asyncio.run(forget_to_close())
    assert asyncio.run(use()) == toy_generate(PROMPT, SHORT)
    gc.collect()
    launching = [thread for thread in own_threads.threads() if thread.name == "aioinfer-launch"]
    assert not still_alive(launching), "the thread of the forgotten engine lives on"


async def test_draining_finishes_what_runs_and_refuses_what_comes(
    make_engine: MakeEngine, gate: Gate
) -> None:
    engine = make_engine(fault=gate)
    await engine.start()
    streams = [engine.generate(PROMPT, SHORT), engine.generate("queued text", SHORT)]
    closing = asyncio.create_task(engine.aclose(drain=True, timeout=60))
    await asyncio.sleep(0)
    assert engine.state is EngineState.DRAINING
    with pytest.raises(errors.EngineClosed):
        engine.generate(PROMPT)
    gate.release()
    assert (await streams[0]).token_ids == toy_generate(PROMPT, SHORT)
    assert len((await streams[1]).token_ids) == 10
    await closing
    assert engine.state is EngineState.CLOSED


async def test_a_drain_that_takes_too_long_ends_with_an_error_for_each(
    make_engine: MakeEngine, gate: Gate
) -> None:
    engine = make_engine(fault=gate)
    await engine.start()
    stream = engine.generate(PROMPT, LONG)
    reader = asyncio.ensure_future(_await(stream))
    closing = asyncio.create_task(engine.aclose(drain=True, timeout=0.05))
    with pytest.raises(errors.EngineClosed):
        await reader
    gate.release()
    await closing


async def test_a_second_close_cuts_the_drain_short(make_engine: MakeEngine, gate: Gate) -> None:
    engine = make_engine(fault=gate)
    await engine.start()
    stream = engine.generate(PROMPT, LONG)
    draining = asyncio.create_task(engine.aclose(drain=True, timeout=3600))
    await asyncio.to_thread(gate.arrived.acquire)
    cut = asyncio.create_task(engine.aclose())
    await asyncio.sleep(0)
    gate.release()
    await cut
    await draining
    with pytest.raises(errors.EngineClosed):
        await stream


@pytest.mark.parametrize("timeout", [-1, 10**400, float("nan"), float("inf"), "3", True])
async def test_closing_within_a_time_that_is_none_is_refused_and_closes_nothing(
    make_engine: MakeEngine, timeout: Any
) -> None:
    async with make_engine() as engine:
        with pytest.raises(errors.InvalidRequest, match="timeout"):
            await engine.aclose(drain=True, timeout=timeout)
        assert engine.ready
        await engine.aclose(drain=True, timeout=0)
        assert not engine.ready


async def test_leaving_with_an_exception_does_not_drain(make_engine: MakeEngine) -> None:
    with pytest.raises(KeyError):
        async with make_engine() as engine:
            stream = engine.generate(PROMPT, LONG)
            raise KeyError
    with pytest.raises(errors.EngineClosed):
        await stream


async def test_a_start_that_fails_says_why_and_can_be_tried_again(own_threads: OwnThreads) -> None:
    engine = Engine(EngineConfig(model="/nowhere/at/all"))
    for _ in range(2):
        with pytest.raises(errors.ConfigError, match="no directory"):
            await engine.start()
    assert engine.state is EngineState.CLOSED
    assert "aioinfer-launch" not in own_threads()


# -- faults --------------------------------------------------------------------------------------------


class Boom(RuntimeError):
    pass


async def test_a_failing_step_fails_its_own_requests_with_the_real_exception(make_engine: MakeEngine) -> None:
    def fault(step: Step) -> None:
        if any(row.sequence.key == 2 for row in step.rows) and step.rows[0].sequence.key == 2:
            raise Boom("at step", step.id)

    async with make_engine(fault=fault, max_running_requests=1) as engine:
        streams = [engine.generate([number], SHORT) for number in (1, 2, 3)]
        results = await asyncio.gather(*map(_await, streams), return_exceptions=True)
        assert engine.ready
        assert results[0].token_ids == toy_generate([1], SHORT)  # type: ignore[union-attr]
        assert isinstance(results[1], errors.StepFailed)
        assert isinstance(results[1].__cause__, Boom)
        assert results[2].token_ids == toy_generate([3], SHORT)  # type: ignore[union-attr]


@pytest.mark.parametrize("where", ["push", "finish"])
async def test_a_detokenizer_that_raises_fails_its_own_request(make_engine: MakeEngine, where: str) -> None:
    class Tokenizer(ToyTokenizer):
        def detokenizer(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool) -> Any:
            good = super().detokenizer(prompt_ids, skip_special_tokens=skip_special_tokens)
            return Stumbling() if prompt_ids[0] == 13 else good

    class Stumbling:
        def push(self, token_id: int) -> str:
            if where == "push":
                raise Boom("no such byte")
            return ""

        def finish(self) -> str:
            raise Boom("nor here")

    async with make_engine(tokenizer=Tokenizer) as engine:
        streams = [engine.generate([number, 1], SHORT) for number in (12, 13, 14)]
        results = await asyncio.gather(*map(_await, streams), return_exceptions=True)
        assert results[0].token_ids == toy_generate([12, 1], SHORT)  # type: ignore[union-attr]
        assert isinstance(results[1], errors.StepFailed)
        assert isinstance(results[1].__cause__, Boom)
        assert results[2].token_ids == toy_generate([14, 1], SHORT)  # type: ignore[union-attr]
        assert engine.ready


@pytest.mark.parametrize("window", [0, 2])
async def test_an_inline_device_that_panics_ends_every_stream(make_engine: MakeEngine, window: int) -> None:
    """Panics of libraries in Rust are no ``Exception``."""

    class Panic(BaseException):
        pass

    def fault(step: Step) -> None:
        if step.id == 3:
            raise Panic

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    engine = make_engine(fault=fault, launch_mode="inline", overlap_steps=window)
    await engine.start()
    streams = [engine.generate([number], LONG) for number in range(1, 4)]
    async with asyncio.timeout(60):
        results = await asyncio.gather(*map(_await, streams), return_exceptions=True)
    assert {type(result) for result in results} == {errors.EngineFailed}
    assert engine.state is EngineState.FAILED
    await engine.aclose()


@pytest.mark.parametrize("panic", [False, True])
async def test_a_tokenizer_that_fails_ends_its_own_stream(make_engine: MakeEngine, panic: bool) -> None:
    class Panic(BaseException):
        pass

    class Tokenizer(ToyTokenizer):
        def encode(self, text: str) -> list[int]:
            if text == "bad":
                raise Panic if panic else Boom
            return super().encode(text)

    async with make_engine(tokenizer=Tokenizer) as engine:
        async with asyncio.timeout(60):
            with pytest.raises(errors.InvalidRequest, match="could not be tokenized"):
                await engine.generate("bad", SHORT)
        assert len((await engine.generate("good", SHORT)).token_ids) == 10


async def test_a_lost_device_ends_every_stream_at_once(make_engine: MakeEngine, gate: Gate) -> None:
    device = ToyDevice(num_slots=16)

    def fault(step: Step) -> None:
        gate(step)
        if step.id == 3:
            device.lost = True
            raise Boom("the device fell off the bus")

    device.fault = fault
    engine = make_engine(device=device)
    await engine.start()
    streams = [engine.generate([number], LONG) for number in range(1, 13)] + [engine.generate("text", LONG)]
    gate.release()
    results = await asyncio.gather(*map(_await, streams), return_exceptions=True)
    assert {type(result) for result in results} == {errors.EngineFailed}
    assert len({id(result) for result in results}) == len(results), "one exception is shared by several tasks"
    assert isinstance(results[0].__cause__, DeviceLost)  # type: ignore[union-attr]
    assert isinstance(results[0].__cause__.__cause__, Boom)  # type: ignore[union-attr]
    assert engine.state is EngineState.FAILED
    assert not engine.ready
    with pytest.raises(errors.EngineFailed):
        engine.generate(PROMPT)
    await engine.aclose()
    assert engine.state is EngineState.CLOSED


async def test_deadlines_end_requests_that_wait_or_run_too_long(make_engine: MakeEngine, gate: Gate) -> None:
    async with make_engine(fault=gate, max_running_requests=1, waiting_timeout=0.05) as engine:
        running = engine.generate(PROMPT, LONG, waiting_timeout=60, running_timeout=0.1)
        waiting = engine.generate(PROMPT, LONG)
        with pytest.raises(errors.TimedOut) as caught:
            await waiting
        assert caught.value.phase == "waiting"
        with pytest.raises(errors.TimedOut) as caught:
            await running
        assert caught.value.phase == "running"
        gate.release()
        assert (await engine.generate(PROMPT, SHORT, waiting_timeout=60)).finish_reason == "length"


async def test_a_full_queue_rejects(make_engine: MakeEngine, gate: Gate) -> None:
    async with make_engine(
        fault=gate, max_running_requests=1, max_queued_requests=2, max_queued_tokens=10
    ) as engine:
        streams = [engine.generate(PROMPT, SHORT)]
        await asyncio.to_thread(gate.arrived.acquire)
        streams += [engine.generate(PROMPT, SHORT)]
        with pytest.raises(errors.Rejected, match="max_queued_tokens"):
            engine.generate([1] * 9, SHORT)
        streams += [engine.generate(PROMPT, SHORT)]
        with pytest.raises(errors.Rejected, match="max_queued_requests"):
            engine.generate(PROMPT, SHORT)
        gate.release()
        for stream in streams:
            assert (await stream).token_ids == toy_generate(PROMPT, SHORT)


async def _await(stream: object) -> object:
    return await stream  # type: ignore[misc]


async def test_a_scheduler_that_is_broken_leaves_nobody_waiting(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    await engine.start()
    streams = [engine.generate([number], SamplingParams(max_tokens=5 + number)) for number in range(1, 7)]
    streams.append(engine.generate("text", LONG))

    def broken(self: Any, request: Any) -> None:
        raise Boom("pages are nowhere to be found")

    monkeypatch.setattr("aioinfer.scheduling.memory.Memory.release", broken)
    async with asyncio.timeout(60):
        results = await asyncio.gather(*map(_await, streams), return_exceptions=True)
    assert {type(result) for result in results} == {errors.EngineFailed}
    assert engine.state is EngineState.FAILED
    streams[0].close()
    await engine.aclose()


async def test_inline_consumers_come_before_the_next_step(make_engine: MakeEngine) -> None:
    device = ToyDevice(num_slots=8)
    async with make_engine(device=device, launch_mode="inline", overlap_steps=0, tokenizer=None) as engine:
        steps = [
            device.steps async for _ in engine.generate([1, 2], SamplingParams(max_tokens=6, ignore_eos=True))
        ]
    assert steps == [1, 2, 3, 4, 5, 6]


async def test_what_free_slots_take_does_not_wait(make_engine: MakeEngine) -> None:
    """A burst on an idle engine is as large as its slots and its queue together."""
    prompt = list(range(1, 9))
    for asked in (prompt, "abcdefgh"):
        async with make_engine(max_running_requests=6, max_queued_requests=2) as engine:
            streams = [engine.generate(asked, SHORT) for _ in range(8)]
            with pytest.raises(errors.Rejected, match=r"^2 requests are waiting"):
                engine.generate(asked, SHORT)
            assert len(await asyncio.gather(*streams)) == 8
    async with make_engine(max_running_requests=6, max_queued_tokens=16) as engine:
        streams = [engine.generate(prompt, SHORT) for _ in range(8)]
        with pytest.raises(errors.Rejected, match=r"^16 prompt tokens are waiting"):
            engine.generate(prompt, SHORT)
        assert len(await asyncio.gather(*streams)) == 8


async def test_slots_without_memory_take_nothing(make_engine: MakeEngine) -> None:
    async with make_engine(num_pages=4, page_size=4, max_running_requests=6, max_queued_requests=2) as engine:
        streams = [engine.generate(list(range(1, 9)), SHORT) for _ in range(4)]
        with pytest.raises(errors.Rejected, match="2 requests are waiting"):
            engine.generate(list(range(1, 9)), SHORT)
        assert len(await asyncio.gather(*streams)) == 4


async def test_a_paused_engine_takes_nothing(make_engine: MakeEngine) -> None:
    async with make_engine(max_running_requests=6, max_queued_requests=2) as engine:
        await engine.pause()
        streams = [engine.generate([1, 2], SHORT) for _ in range(2)]
        with pytest.raises(errors.Rejected, match="2 requests are waiting"):
            engine.generate([1, 2], SHORT)
        engine.resume()
        assert len(await asyncio.gather(*streams)) == 2
