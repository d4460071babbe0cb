"""The synchronous engine: every way out of it leaves nothing behind and the object usable."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections import UserDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from aioinfer import errors
from aioinfer.execution.device import Flight, StepResult
from aioinfer.llm import LLM
from aioinfer.outputs import Chunk
from aioinfer.params import SamplingParams
from aioinfer.scheduling.audit import check_idle
from tests.engine.making import make_llm
from tests.toys import ToyDevice, ToyTokenizer, toy_generate

LONG = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 9], [10, 11]]


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS, params: SamplingParams = SHORT) -> None:
    """A good call gives good answers, and leaves nothing."""
    results = llm.generate(prompts, params, progress=False)
    assert [result.token_ids for result in results] == [toy_generate(prompt, params) for prompt in prompts]
    assert not llm.has_unfinished()
    check_idle(llm._core.scheduler)


def test_a_bad_prompt_beside_other_requests_leaves_these() -> None:
    with make_llm() as llm:
        key = llm.add_request([1, 2], SHORT)
        with pytest.raises(errors.InvalidRequest) as caught:
            llm.generate([[5, 6], [10**9]], progress=False)
        assert caught.value.field == "prompts[1]"
        assert llm.stats().admitted == 0
        answers_of_others = llm.generate([[5, 6]], SHORT, progress=False)
        assert [result.token_ids for result in answers_of_others] == [toy_generate([5, 6], SHORT)]
        found = {}
        while llm.has_unfinished():
            found |= llm.step()
        assert {key: result.token_ids for key, result in found.items()} == {key: toy_generate([1, 2], SHORT)}


@pytest.mark.parametrize("prompt", ["abc", [5, 6, 7], (5, 6, 7), [{"role": "user", "content": "hi"}]])
def test_a_single_prompt_is_a_batch_of_one(prompt: Any) -> None:
    tokenizer = ToyTokenizer()
    with make_llm() as llm:
        (result,) = llm.generate(prompt, SHORT, progress=False)
        (again,) = llm.generate([prompt], SHORT, progress=False)
        assert llm.generate([], progress=False) == []
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt)
    elif not isinstance(prompt[0], int):
        prompt = tokenizer.encode_chat(prompt)
    assert result.token_ids == again.token_ids == toy_generate(prompt, SHORT)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_a_message_is_no_batch_of_prompts(kind: Any) -> None:
    with make_llm() as llm:
        with pytest.raises(errors.InvalidRequest) as caught:
            llm.generate(kind(role="user", content="hi"), SHORT, progress=False)
        assert caught.value.field == "prompt"
        answers(llm)


def test_an_aborted_request_is_not_returned_and_gives_everything_back() -> None:
    with make_llm() as llm:
        keys = [llm.add_request(prompt, LONG) for prompt in PROMPTS]
        llm.step()
        assert llm.abort(keys[1])
        assert not llm.abort(keys[1])
        assert not llm.abort(999)
        found = {}
        while llm.has_unfinished():
            found |= llm.step()
        assert sorted(found) == [keys[0], keys[2]]
        check_idle(llm._core.scheduler)
        assert not llm.abort(keys[0])


def test_chunks_of_steps_concatenate_to_the_results() -> None:
    with make_llm() as llm:
        keys = [llm.add_request(prompt, SHORT) for prompt in PROMPTS]
        chunks: dict[int, list[Chunk]] = {key: [] for key in keys}
        results, rounds = {}, 0
        while llm.has_unfinished():
            results |= llm.step()
            for key, chunk in llm.take_chunks().items():
                chunks[key].append(chunk)
            rounds += 1
        assert llm.take_chunks() == {}
    for key, prompt in zip(keys, PROMPTS, strict=True):
        assert len(chunks[key]) > 3
        assert [token for chunk in chunks[key] for token in chunk.token_ids] == toy_generate(prompt, SHORT)
        assert "".join(chunk.text for chunk in chunks[key]) == results[key].text
        assert [chunk.finish_reason for chunk in chunks[key]][-1] == "length"


def test_a_stream_of_chunks_can_be_left_at_any_time() -> None:
    with make_llm() as llm:
        chunks = list(llm.stream([1, 2, 3], SHORT))
        assert [token for chunk in chunks for token in chunk.token_ids] == toy_generate([1, 2, 3], SHORT)
        assert not llm.has_unfinished()
        with pytest.raises(errors.InvalidRequest):
            llm.stream([10**9])
        for _ in llm.stream([1, 2, 3], LONG):
            break
        assert not llm.has_unfinished()
        llm.stream([1, 2, 3], LONG)  # never read
        both = zip(llm.stream([1, 2], SHORT), llm.stream([3, 4], SHORT), strict=False)
        read = [[token for chunk in each for token in chunk.token_ids] for each in zip(*both, strict=True)]
        assert read[0] == toy_generate([1, 2], SHORT)
        answers(llm)


def until_one_is_late(llm: LLM) -> None:
    """Deadlines run on between calls."""
    while not llm.stats().finished:
        pass


def test_a_request_that_runs_too_long_is_raised_and_the_others_go_on() -> None:
    with make_llm() as llm:
        late = llm.add_request(PROMPTS[0], LONG, running_timeout=0.01)
        key = llm.add_request(PROMPTS[1], LONG, running_timeout=1000, waiting_timeout=100)
        others = llm.step()
        chunks = llm.take_chunks()
        until_one_is_late(llm)
        with pytest.raises(errors.TimedOut, match=r"0\.01 s running"):
            llm.step()
        assert 1 <= len(chunks[late].token_ids) < 40
        while llm.has_unfinished():
            others |= llm.step()
        assert {at: result.token_ids for at, result in others.items()} == {
            key: toy_generate(PROMPTS[1], LONG)
        }
        check_idle(llm._core.scheduler)
        answers(llm)


def test_whole_calls_and_streams_have_deadlines() -> None:
    slow = 2

    def fault(step: Any) -> None:
        if step.id == slow:
            threading.Event().wait(0.02)  # a step that takes longer than the deadline

    with make_llm(fault=fault) as llm:
        with pytest.raises(errors.TimedOut, match=r"0\.01 s running"):
            llm.generate(PROMPTS, LONG, progress=False, running_timeout=0.01)
        assert not llm.has_unfinished()
        slow = llm._core.scheduler.queues.last_step + 3
        ids: list[int] = []
        with pytest.raises(errors.TimedOut, match=r"0\.01 s running"):
            for chunk in llm.stream(PROMPTS[0], LONG, running_timeout=0.01):
                ids += chunk.token_ids
        assert ids == toy_generate(PROMPTS[0], LONG)[: len(ids)]


def test_a_failed_step_ends_the_requests_of_the_call() -> None:
    def fault(step: Any) -> None:
        if any(row.kv_length > len(row.sequence.prompt_ids) + 3 for row in step.rows) and failing:
            raise ZeroDivisionError

    failing = [True]
    with make_llm(fault=fault) as llm:
        with pytest.raises(errors.StepFailed) as caught:
            llm.generate(PROMPTS, LONG, progress=False)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert not llm.has_unfinished()
        failing.clear()
        answers(llm)


@pytest.mark.parametrize("overlap_steps", [0, 1, 2])
def test_an_interrupt_leaves_a_usable_object_and_no_request(overlap_steps: int) -> None:
    at = 0

    def fault(step: Any) -> None:
        if step.id == at:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with make_llm(fault=fault, overlap_steps=overlap_steps) as llm:
        for stop in (1, 2, 3, 5, 8, 13):
            at = llm._core.scheduler.queues.last_step + stop
            with pytest.raises(KeyboardInterrupt):
                llm.generate(PROMPTS, LONG, progress=False)
            at = 0
            answers(llm)


@pytest.mark.parametrize("begun", [False, True])
def test_an_interrupt_while_a_call_is_handed_over_leaves_no_request(
    monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    with make_llm() as llm:
        hand_over = llm._home.loop.call_soon_threadsafe

        def interrupted(call: Any) -> None:
            monkeypatch.undo()
            if begun:
                hand_over(call)
            raise KeyboardInterrupt

        monkeypatch.setattr(llm._home.loop, "call_soon_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, LONG.changed(max_tokens=200), progress=False)
        for _ in range(3):
            stats = llm.stats()
            assert not stats.running + stats.waiting + stats.arriving
        answers(llm)


def test_within_an_event_loop_and_on_another_thread_it_works_as_everywhere() -> None:
    async def called() -> None:
        answers(llm)

    with make_llm() as llm:
        asyncio.run(called())
        with ThreadPoolExecutor(1) as threads:
            threads.submit(answers, llm).result()


def test_one_that_is_dropped_ends_its_thread() -> None:
    llm = make_llm()
    thread = llm._home.thread
    answers(llm)
    del llm
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_after_closing_everything_is_refused() -> None:
    llm = make_llm()
    key = llm.add_request([1, 2], LONG)
    stream = llm.stream([1, 2], LONG)
    next(stream)
    llm.close()
    llm.close()
    assert not llm.has_unfinished()
    assert not llm.abort(key)
    for call in (llm.step, lambda: llm.add_request([1]), lambda: llm.generate([1]), lambda: llm.stream([1])):
        with pytest.raises(errors.EngineClosed):
            call()
    with pytest.raises((errors.Cancelled, errors.EngineClosed)):
        list(stream)


# -- streams of chunks that are dropped amid other calls end their own requests only -----------------------

ENDLESS = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
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
    stream = llm.stream([1, 2, 3], ENDLESS)
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
        until_given_back(llm)


def until_given_back(llm: LLM) -> None:
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
        until_given_back(llm)
