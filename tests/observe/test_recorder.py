"""The recorder: what requests and steps add to histograms, exactly, and at bounded cost."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from aioinfer import SamplingParams
from aioinfer.errors import (
    Cancelled,
    ConstraintFailed,
    EngineClosed,
    EngineFailed,
    InvalidRequest,
    OutOfMemory,
    Rejected,
    StepFailed,
    TimedOut,
)
from aioinfer.observe.metrics import histograms, recorder
from aioinfer.observe.metrics.histograms import Histogram, token_bounds
from aioinfer.observe.metrics.measuring import Measuring
from aioinfer.observe.metrics.recorder import CAUSES, Recorder, Snapshot, cause_of
from aioinfer.observe.observers import Observer, Observers
from tests.counting import no_collection
from tests.engine.simulation import simulate
from tests.engine.worlds import make_world
from tests.observe.scrapes import toy_engine
from tests.tiers import SECONDS, rest, scaled

PER_TURN = recorder._TIMES_PER_TURN


def make_recorder(loop: asyncio.AbstractEventLoop) -> Recorder:
    stats: Any = lambda: (None, 0)  # noqa: E731
    return Recorder(loop, 100, stats)


def ended(times: list[float], **more: Any) -> Any:
    """A request that has ended, with tokens at these times."""
    fields = {
        "key": 1,
        "prompt_ids": [1, 2],
        "request": SimpleNamespace(params=SimpleNamespace(max_tokens=5)),
        "accepted": True,
        "arrival": 0.0,
        "admitted_at": 0.5,
        "finished_at": 9.0,
        "finish_reason": "stop",
        "error": None,
    }
    return SimpleNamespace(token_times=times, computed_times=times, **{**fields, **more})


# -- histograms ----------------------------------------------------------------------------------------


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0, 1, 1.5, 2, 5, 5.1, 100):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1, 2]
    counts = histogram.read()
    assert counts.cumulative() == [(1, 2), (2, 4), (5, 5)]
    assert counts.cumulative((2,)) == [(2, 4)]
    histogram.observe(3)
    assert counts.counts == (2, 2, 1, 2), "a reading changes no more"


def test_the_bounds_are_those_of_vllm_and_finer_ones() -> None:
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(99) == (1, 2, 5, 10, 20, 50)
    assert token_bounds(1) == (1,)
    assert set(histograms.VLLM_GAP) < set(histograms.GAP)
    assert set(histograms.VLLM_LATENCY) < set(histograms.LATENCY)
    for name in ("TTFT", "GAP", "LATENCY", "LAG", "STEP_TOKENS", "N"):
        bounds = getattr(histograms, name)
        assert list(bounds) == sorted(set(bounds))


# -- requests ------------------------------------------------------------------------------------------


async def test_a_request_is_counted_once_in_everything_that_it_reached() -> None:
    recorder = make_recorder(asyncio.get_running_loop())
    recorder.ended(ended([1.0, 1.5, 1.5, 3.0]))
    recorder.ended(ended([], finish_reason="abort", admitted_at=None, error=TimedOut("waiting", 1.0)))
    refused = ended(
        [], accepted=False, finished_at=None, finish_reason="abort", admitted_at=None, error=Rejected("")
    )
    recorder.ended(refused)
    while not recorder.counted:
        await asyncio.sleep(0)
    totals = {name: (sum(each.counts), each.total) for name, each in recorder.histograms.items()}
    assert totals == {
        "ttft": (1, 1.0),
        "gap": (2, 2.0),  # what was read at one time has no gap
        "per_token": (1, pytest.approx(2 / 3)),
        "queued": (1, 0.5),
        "prefill": (1, 0.5),
        "decode": (1, 2.0),
        "inference": (1, 8.5),
        "whole": (2, 18.0),
        "prompt_tokens": (2, 4.0),
        "output_tokens": (2, 4.0),
        "max_tokens": (2, 10.0),
        "n": (0, 0.0),
        "step_tokens": (0, 0.0),
        "lag": (0, 0.0),
    }
    assert recorder.finished == {"stop": 1, "length": 0, "abort": 2}
    assert {cause: count for cause, count in recorder.aborts.items() if count} == {
        "waiting_timeout": 1,
        "queue_full": 1,
    }
    assert recorder.rejections == 1


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (None, "closed"),
        (Cancelled("by a caller"), "closed"),
        (TimedOut("waiting", 1.0), "waiting_timeout"),
        (TimedOut("running", 1.0), "running_timeout"),
        (InvalidRequest("prompt", "is bad"), "invalid"),
        (ConstraintFailed(["grammar"], "ends"), "constraint"),
        (Rejected("full"), "queue_full"),
        (Rejected("late", 3.0, "deadline"), "deadline"),
        (Rejected("late", 3.0, "ttft_target"), "ttft_target"),
        (StepFailed("raised"), "step_failed"),
        (OutOfMemory("twice"), "out_of_memory"),
        (EngineFailed("lost"), "engine_failed"),
        (EngineClosed("closed"), "engine_closed"),
        (RuntimeError("anything that a caller can cause: " + "x" * 1000), "other"),
    ],
)
def test_causes_are_few_whatever_the_error_says(error: BaseException | None, cause: str) -> None:
    assert cause_of(error) == cause
    assert cause in CAUSES


@pytest.mark.parametrize("seed", range(3))
async def test_gaps_of_any_number_of_tokens_are_counted_exactly(seed: int) -> None:
    dice = random.Random(seed)
    recorder = make_recorder(asyncio.get_running_loop())
    expected: Counter[int] = Counter()
    total = 0.0
    most = PER_TURN
    for length in (1, 2, most, most + 1, most + 2, 3 * most + 7, *dice.choices(range(1, 50), k=200)):
        gaps = [dice.choice([0.0, 0.0004, 0.001, 0.02, 0.3, 99.0]) for _ in range(length - 1)]
        times = list(itertools.accumulate(gaps, initial=5.0))
        found = [after - before for before, after in itertools.pairwise(times) if after > before]
        reference = Histogram(histograms.GAP)
        for gap in found:
            reference.observe(gap)
        expected.update(dict(enumerate(reference.counts)))
        total += sum(found)
        recorder.ended(ended(times))
    while not recorder.counted:
        await asyncio.sleep(0)
    assert recorder.gap.counts == [expected[index] for index in range(len(histograms.GAP) + 1)]
    assert recorder.gap.total == pytest.approx(total)


class Looked(list[float]):
    """Token times that count how many of them are read."""

    def __init__(self, count: int) -> None:
        super().__init__(float(index) for index in range(count))
        self.reads: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.reads.append(len(found) if isinstance(index, slice) else 1)
        return found

    def __iter__(self) -> Any:
        raise AssertionError("all tokens at once")


async def test_the_end_of_a_long_request_costs_a_turn_of_the_loop_no_more_than_any_other() -> None:
    recorder = make_recorder(asyncio.get_running_loop())
    requests = [Looked(50_000) for _ in range(4)]
    for times in requests:
        recorder.ended(ended(times))
        assert sum(times.reads) <= 3, "tokens are read where the request ends"
    turns = 0
    while not recorder.counted:
        before = sum(sum(times.reads) for times in requests)
        await asyncio.sleep(0)
        turns += 1
        assert sum(sum(times.reads) for times in requests) - before <= PER_TURN + 4
    assert turns >= 4 * 50_000 // PER_TURN
    assert sum(recorder.gap.counts) == 4 * 49_999


# -- engines -------------------------------------------------------------------------------------------


async def calls_of(requests: int, *, measured: bool) -> tuple[int, int]:
    """Calls of what observes, while so many requests get 40 tokens each side by side; and steps."""
    count = 0

    def profile(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        name = frame.f_code.co_filename
        count += event == "call" and ("/observe/metrics/" in name or "observers.py" in name)

    params = SamplingParams(max_tokens=40, ignore_eos=True)
    async with toy_engine(launch_mode="inline", num_pages=600, max_running_requests=32) as engine:
        if measured:
            assert engine.measuring.recorder is not None
        streams = [engine.generate([index + 1, 2, 3], params) for index in range(requests)]
        with no_collection():
            sys.setprofile(profile)
            try:
                for stream in streams:
                    await stream
            finally:
                sys.setprofile(None)
        return count, engine.stats().steps


@pytest.mark.parametrize("requests", [1, 32])
async def test_metrics_cost_calls_by_step_and_by_request_and_none_by_token(requests: int) -> None:
    calls, steps = await calls_of(requests, measured=True)
    assert 0 < calls <= 8 * steps + 30 * requests
    assert requests * 40 > 8 * steps or requests == 1, "many tokens in few steps"
    unmeasured, steps = await calls_of(requests, measured=False)
    # Whether there is an observer is asked in each step and at the end of each request.
    assert unmeasured <= 2 * (steps + requests)


async def test_histograms_begin_when_measuring_does_also_on_a_running_engine() -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    async with toy_engine() as engine:
        await engine.generate([1, 2, 3], params)
        measuring = engine.measuring
        assert engine.measuring is measuring
        await engine.generate([1, 2, 3], params)
        snapshot = measuring.snapshot()
        assert snapshot is not None
        assert snapshot.stats.finished == 2
        assert sum(snapshot.histograms["whole"].counts) == 1
        assert snapshot.finished == {"stop": 0, "length": 1, "abort": 0}
    assert measuring.snapshot() is None
    async with engine:
        await engine.generate([1, 2, 3], params)
        again = measuring.snapshot()
        assert again is not None
        assert sum(again.histograms["whole"].counts) == again.stats.finished == 1


async def test_every_way_out_of_a_request_is_counted_by_its_cause() -> None:
    async with toy_engine(max_running_requests=1, max_queued_requests=2, num_pages=200) as engine:
        measuring = engine.measuring
        long = SamplingParams(max_tokens=200, ignore_eos=True)
        engine._serving().driver.paused = True
        running = engine.generate([1, 2, 3], long)
        late = engine.generate([1, 2, 3], long, waiting_timeout=1e-9)
        with pytest.raises(Rejected):
            engine.generate([1, 2, 3], long)
        with pytest.raises(TimedOut):
            await late
        running.close()
        with pytest.raises(InvalidRequest):
            await engine.generate("x" * 250, SamplingParams(max_tokens=5000, min_tokens=5000))
        engine.resume()
        assert (await engine.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))).token_ids
        snapshot = measuring.snapshot()
    assert snapshot is not None
    assert snapshot.finished == {"stop": 0, "length": 1, "abort": 3}
    assert {cause: count for cause, count in snapshot.aborts.items() if count} == {
        "waiting_timeout": 1,
        "closed": 1,
        "invalid": 1,
    }
    assert snapshot.rejections == 1


async def test_the_backlog_is_what_open_streams_have_not_read() -> None:
    async with toy_engine() as engine:
        measuring = engine.measuring
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        slow = engine.generate([1, 2, 3], SamplingParams(max_tokens=60, ignore_eos=True), max_lag=7)
        await engine.generate([4, 5, 6], params)
        while not engine.stats().parkings or engine.stats().steps_in_flight:
            await asyncio.sleep(0)
        snapshot = measuring.snapshot()
        assert snapshot is not None
        unread = slow.usage.completion_tokens
        assert snapshot.backlog == unread > 7
        await slow
        after = measuring.snapshot()
        assert after is not None
        assert after.backlog == 0


class Broken(Observer):
    def __init__(self) -> None:
        self.calls = 0

    def ended(self, request: Any) -> None:
        self.calls += 1
        raise RuntimeError("an exporter of the application's")


async def test_an_observer_that_raises_is_switched_off_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with toy_engine() as engine:
        broken = Broken()
        engine._serving().observers.add(broken)
        measuring = engine.measuring
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        results = [await engine.generate([1, 2, 3], params) for _ in range(3)]
        assert [len(result.token_ids) for result in results] == [4, 4, 4]
        assert broken.calls == 1
        snapshot = measuring.snapshot()
        assert snapshot is not None
        assert snapshot.finished["length"] == 3
    assert "Broken raised and is switched off" in caplog.text


class Opened(Observer):
    """Counts by itself what the recorder should have counted."""

    def __init__(self) -> None:
        self.open: set[Any] = set()
        self.ends = 0
        self.rejections = 0

    def opened(self, request: Any, *, chat: bool) -> None:
        self.open.add(request)

    def ended(self, request: Any) -> None:
        self.open.remove(request)  # else it was not opened, or ended twice
        assert request.ended
        self.ends += 1

    def rejected(self) -> None:
        self.rejections += 1


@rest(SECONDS)
def test_counts_are_conserved_through_random_lifetimes_and_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request ends once in the metrics; their sums are those of stats(), whatever happened to it."""
    told: list[tuple[Snapshot, Opened, bool]] = []
    closed, begin = Measuring.closed, Measuring.begin

    def begun(self: Measuring, observers: Observers, *rest: Any) -> None:
        begin(self, observers, *rest)
        self.opened_requests = Opened()  # type: ignore[attr-defined]
        observers.add(self.opened_requests)  # type: ignore[attr-defined]

    def closing(self: Measuring) -> None:
        if self.recorder is not None:
            told.append((self.recorder.snapshot(), self.opened_requests, self.recorder.counted))  # type: ignore[attr-defined]
        closed(self)

    def strict(self: Observers, event: str, *what: Any, **named: Any) -> None:
        for each in self._each:
            getattr(each, event)(*what, **named)

    monkeypatch.setattr(Measuring, "begin", begun)
    monkeypatch.setattr(Measuring, "closed", closing)
    monkeypatch.setattr(Observers, "_tell", strict)

    def make(seed: int, fault_rate: float, lose_at: int | None) -> Any:
        world = make_world(seed, fault_rate, lose_at)
        assert world.engine.measuring.recorder is None
        return world

    for seed in range(scaled(40)):
        world, _ = simulate(seed, 30, lose_at=20 if seed % 8 == 7 else None, make=make)
        snapshot, opened, counted = told.pop()
        where = f"seed={seed}"
        assert not opened.open, where
        assert sum(snapshot.finished.values()) == opened.ends, where
        assert snapshot.finished["abort"] == sum(snapshot.aborts.values()), where
        later = sum(snapshot.aborts[cause] for cause in ("queue_full", "deadline", "ttft_target"))
        assert snapshot.rejections == opened.rejections + later, where
        # Turns that are the past of a session are no lifetimes.
        assert later >= world.counts["rejected later"], where
        assert world.device.lost or opened.rejections >= world.counts["rejected"], where
        stats, seen = snapshot.stats, snapshot.histograms
        assert seen["output_tokens"].total == stats.output_tokens, where
        assert sum(seen["step_tokens"].counts) <= stats.steps, where
        assert sum(seen["queued"].counts) >= sum(seen["ttft"].counts) == sum(seen["decode"].counts), where
        if counted and sum(seen["gap"].counts):
            assert seen["gap"].total == pytest.approx(seen["decode"].total), where
