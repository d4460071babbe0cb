"""A stream of chunks of the synchronous engine that is dropped amid other calls ends its own request only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from aioinfer.execution.device import Flight, StepResult
from aioinfer.llm import LLM
from aioinfer.outputs import Chunk
from aioinfer.params import SamplingParams
from aioinfer.scheduling.audit import check_idle
from tests.engine.making import make_llm
from tests.toys import ToyDevice, toy_generate

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = [4, 5, 6, 7]


class HookedDevice(ToyDevice):
    """Calls ``hooks[place]`` once: amid the planning of steps, or while the result of one is waited for."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.hooks: dict[str, Callable[[], None]] = {}

    def call(self, place: str) -> None:
        self.hooks.pop(place, lambda: None)()

    def launch(self, prepared: Any) -> Flight:
        self.call("launch")
        return _HookedFlight(self, super().launch(prepared))


class _HookedFlight:
    def __init__(self, device: HookedDevice, flight: Flight) -> None:
        self._device = device
        self._flight = flight

    def wait(self) -> StepResult:
        self._device.call("wait")
        return self._flight.wait()


def begun(llm: LLM) -> list[Iterator[Chunk]]:
    """A stream that is being read, and the only reference to it."""
    stream = llm.stream([1, 2, 3], LONG)
    next(stream)
    next(stream)
    return [stream]


def drop(held: list[Any]) -> None:
    held.clear()


def drop_on_a_thread(held: list[Any]) -> None:
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()


@pytest.mark.parametrize("overlap_steps", [0, 1, 2])
@pytest.mark.parametrize("place", ["launch", "wait"])
@pytest.mark.parametrize("leave", [drop, drop_on_a_thread])
def test_a_stream_dropped_during_a_step_leaves_the_others(
    leave: Callable[[list[Any]], None], place: str, overlap_steps: int
) -> None:
    device = HookedDevice()
    with make_llm(device=device, overlap_steps=overlap_steps) as llm:
        held = begun(llm)
        device.hooks[place] = lambda: leave(held)
        (result,) = llm.generate(PROMPT, SHORT, progress=False)
        assert not device.hooks
        assert not held
        assert result.token_ids == toy_generate(PROMPT, SHORT)
        until_idle(llm)


def until_idle(llm: LLM) -> None:
    """Streams that are dropped end in a later turn of the engine's loop."""
    while llm._core.scheduler.queues.has_unfinished:
        pass
    llm.generate(PROMPT, SHORT, progress=False)
    check_idle(llm._core.scheduler)


def test_a_stream_dropped_between_two_calls_is_ended_by_the_next() -> None:
    with make_llm(max_queued_requests=1) as llm:
        held = begun(llm)
        waiting = begun(llm)
        drop_on_a_thread(held)
        drop(waiting)
        key = llm.add_request(PROMPT, SHORT)
        results = {}
        while llm.has_unfinished():
            results |= llm.step()
        assert results[key].token_ids == toy_generate(PROMPT, SHORT)
        check_idle(llm._core.scheduler)


def test_streams_dropped_by_several_threads_at_once_leave_nothing() -> None:
    device = HookedDevice()
    with make_llm(device=device, overlap_steps=1) as llm:
        held = [begun(llm) for _ in range(3)]

        def leave() -> None:
            threads = [threading.Thread(target=each.clear) for each in held]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        device.hooks["launch"] = leave
        (result,) = llm.generate(PROMPT, SHORT, progress=False)
        assert result.token_ids == toy_generate(PROMPT, SHORT)
        until_idle(llm)
