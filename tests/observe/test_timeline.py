"""The timeline: three consistent lanes, step by step, in bounded memory."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import StepFailed
from aioinfer.observe import timeline as timeline_module
from aioinfer.observe.timeline import DeviceLane, Overlap, Timeline
from aioinfer.params import Grammar, SamplingParams
from tests.engine.simulation import settle
from tests.observe.scrapes import toy_engine
from tests.tiers import SECONDS, rest

#: event names of each lane, in the order of one step
LANES = {
    "loop": ["plan", "pack", "resolve", "deliver"],
    "launch": ["launch"],
    "device": ["forward", "mask", "sample", "copy"],
}
#: events of some steps: masks of grammars, and the copy of results on the toy device
SOMETIMES = {"mask", "copy"}
#: rounding of the times in a trace in microseconds, with a margin
ROUNDING = 0.003


def read_trace(text: str) -> dict[str, list[dict[str, Any]]]:
    """The events of a Chrome trace by lane, after a check of its form."""
    trace = json.loads(text)
    events = trace["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == list(LANES)
    order = {
        event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"
    }
    assert sorted(order, key=order.__getitem__) == list(names), "drawn from top to bottom as above"
    lanes: dict[str, list[dict[str, Any]]] = {name: [] for name in LANES}
    for event in events:
        assert event["pid"] == 1
        assert event["ph"] in ("M", "X", "b", "e")
        if event["ph"] == "X":
            assert event["name"] == f"{event['cat']} {event['args']['step']}"
            assert event["ts"] >= 0
            assert event["dur"] >= 0
            # A step with drafts is resolved by this name; look-ups find some now and then.
            event["cat"] = event["cat"].replace("verify", "resolve")
            lanes[names[event["tid"]]].append(event)
    for name, found in lanes.items():
        assert {event["cat"] for event in found} <= set(LANES[name])
        for before, after in itertools.pairwise(found):
            assert after["ts"] >= before["ts"] + before["dur"] - ROUNDING, (
                "one thread did two things at a time"
            )
    return lanes


def by_step(lanes: dict[str, list[dict[str, Any]]]) -> dict[int, dict[str, dict[str, Any]]]:
    """Events by step and name; each at most once."""
    steps: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in (event for events in lanes.values() for event in events):
        step = steps[event["args"]["step"]]
        assert event["cat"] not in step
        step[event["cat"]] = event
    return steps


def check_order(step: dict[str, dict[str, Any]]) -> None:
    """A later stage of a step did not begin earlier, across lanes."""
    life = ["plan", "pack", "launch", "forward", "mask", "sample", "copy", "resolve", "deliver"]
    events = [step[what] for what in life if what in step]
    assert [event["cat"] for event in events if event["cat"] not in SOMETIMES] == [
        what for what in life if what not in SOMETIMES
    ]
    for before, after in itertools.pairwise(events):
        assert after["ts"] >= before["ts"] - ROUNDING, (before, after)
    launch, sample, resolve = step["launch"], step["sample"], step["resolve"]
    assert sample["ts"] + sample["dur"] <= launch["ts"] + launch["dur"] + ROUNDING, (
        "the device is part of the launch"
    )
    assert resolve["ts"] >= sample["ts"] + sample["dur"] - ROUNDING, "a result was read before it was there"


async def test_steps_with_drafts_are_seen() -> None:
    config = EngineConfig(threads=1, adaptive_drafts=False)
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    async with Engine(config) as engine:
        plain = await engine.generate("Hello", replace(params, speculate=False))
        assert '"verify ' not in engine.timeline.chrome_trace()
        await engine.generate("Hello", replace(params, prediction=plain.token_ids))
        await settle(engine)
        assert '"verify ' in engine.timeline.chrome_trace()


@pytest.mark.parametrize("mode", ["thread", "inline"])
@pytest.mark.parametrize("window", [0, 1, 2])
async def test_every_step_goes_through_all_lanes_in_order(window: Any, mode: Any) -> None:
    config = EngineConfig(threads=1, overlap_steps=window, launch_mode=mode)
    async with Engine(config) as engine:
        stats = engine.stats()
        assert (stats.overlap_ratio, stats.host_gap, stats.loop_lag, stats.loop_lag_worst) == (1.0, 0, 0, 0)
        grammar = Grammar("regex", "[a-z ]{12}")
        bound = SamplingParams(seed=1, max_tokens=12, grammar=grammar)
        free = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        await engine.generate("Hello", free)
        await settle(engine)
        alone = engine.stats().steps
        await asyncio.gather(*[engine.generate("Hello", params) for params in (bound, free, free)])
        await settle(engine)
        stats = engine.stats()
        steps = by_step(read_trace(engine.timeline.chrome_trace()))
    assert sorted(steps) == list(range(1, stats.steps + 1))
    for step in steps.values():
        check_order(step)
    masked = [number for number, step in steps.items() if "mask" in step]
    assert masked, "steps with grammars wait for masks"
    assert min(masked) > alone > 0, "others do not"
    assert 0 < stats.overlap_ratio <= 1
    assert stats.host_gap >= 0
    assert 0 <= stats.loop_lag <= stats.loop_lag_worst


async def test_new_steps_replace_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_module, "_EVENTS", 40)
    async with toy_engine() as engine:
        timeline = engine.timeline
        rings = [id(lane.events) for lane in (timeline.loop, timeline.launch, timeline.device)]
        for _ in range(3):
            await engine.generate([1], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
            await settle(engine)
            lanes = read_trace(timeline.chrome_trace())
            assert {name: len(events) for name, events in lanes.items()} == dict.fromkeys(LANES, 40)
            newest = engine.stats().steps
            assert [events[-1]["args"]["step"] for events in lanes.values()] == [newest] * 3
            steps = by_step(lanes)
            assert min(steps) == newest - 39, "one event per step in the launch thread's lane"
            for step in range(newest - 8, newest + 1):
                check_order(steps[step])
        assert [id(lane.events) for lane in (timeline.loop, timeline.launch, timeline.device)] == rings
        assert engine.timeline.overlap().steps > 100, "sums go on beyond the ring"


def test_an_empty_timeline_is_a_trace() -> None:
    assert read_trace(Timeline().chrome_trace()) == {name: [] for name in LANES}


@rest(SECONDS)
def test_a_trace_can_be_taken_while_lanes_are_written() -> None:
    timeline = Timeline()
    under_way, done = threading.Event(), threading.Event()

    def write() -> None:
        step = 0
        while not done.is_set():
            step += 1
            timeline.device.step(step, step, step + 0.25, step + 0.5, step + 0.75)
            under_way.set()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        under_way.wait()
        for _ in range(3):
            assert read_trace(timeline.chrome_trace())["device"]
    finally:
        done.set()
        writer.join()


def test_idle_time_without_work_is_not_a_gap() -> None:
    lane = DeviceLane()
    lane.step(1, 10.0, 11.0, 11.0, 12.0)  # the first step after idle time: no gap is counted
    lane.step(2, 12.5, 13.0, 13.5, 14.0)
    lane.rest()
    lane.step(3, 50.0, 51.0, 51.0, 52.0)
    lane.step(4, 52.5, 53.0, 53.0, 55.0)
    assert (lane.steps, lane.busy, lane.gap) == (2, 1.5 + 2.5, 0.5 + 0.5)
    assert [what for what, step, _, _ in lane.events if step == 2] == ["forward", "mask", "sample"]
    assert [what for what, step, _, _ in lane.events if step == 4] == ["forward", "sample"]


def test_overlap_is_a_share_and_a_mean() -> None:
    overlap = Overlap(4, 3.0, 1.0)
    assert (overlap.ratio, overlap.gap_per_step) == (0.75, 0.25)
    assert (Overlap(0, 0.0, 0.0).ratio, Overlap(0, 0.0, 0.0).gap_per_step) == (1.0, 0.0)


def test_lag_is_smoothed_and_its_worst_is_kept() -> None:
    timeline = Timeline()
    for seconds in (0.0, 6.4, *[0.1] * 1000):
        timeline.noticed(seconds)
    assert timeline.lag == pytest.approx(0.1, abs=1e-6)
    assert timeline.lag_worst == 6.4


@pytest.mark.parametrize("mode", ["thread", "inline"])
async def test_a_step_that_fails_leaves_the_lanes_in_order(mode: str) -> None:
    def fault(step: Any) -> None:
        if step.id == 5:
            raise RuntimeError("injected")

    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    async with toy_engine(fault=fault, launch_mode=mode) as engine:
        with pytest.raises(StepFailed):
            await engine.generate([1], params)
        await engine.generate([2], params)
        await settle(engine)
        steps = by_step(read_trace(engine.timeline.chrome_trace()))
    assert "forward" not in steps[5]
    assert {"plan", "pack", "resolve", "deliver"} <= steps[5].keys()
    for number in steps.keys() - {5}:
        check_order(steps[number])
