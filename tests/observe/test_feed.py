"""The feed of steps: every event once and in order, and a bounded number of them."""

from __future__ import annotations

import json
import threading
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from aioinfer.observe.feed import _MOST_EVENTS, GAUGES, StepFeed
from aioinfer.observe.timeline import Timeline

STATS: Any = SimpleNamespace(**dict.fromkeys(GAUGES, 0))


def read(feed: StepFeed, timeline: Timeline, stats: Any = STATS) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads(feed.frame(timeline, stats)[0])
    return frame


def steps(frame: dict[str, Any], lane: str = "loop") -> list[int]:
    return [event[1] for event in frame["lanes"][lane]]


def test_each_event_comes_once_with_times_in_microseconds() -> None:
    feed, timeline = StepFeed(), Timeline()
    origin = feed._origin
    timeline.loop.add("plan", 1, origin + 1.0, origin + 1.00025)
    frame = read(feed, timeline)
    assert frame["lanes"] == {"loop": [["plan", 1, 1_000_000, 250]], "launch": [], "device": []}
    assert frame["stats"] == dict.fromkeys(GAUGES, 0)
    assert steps(read(feed, timeline)) == []
    timeline.loop.add("plan", 2, origin + 2.0, origin + 2.1)
    timeline.launch.add("launch", 2, origin + 2.1, origin + 2.2)
    frame = read(feed, timeline)
    assert (steps(frame), steps(frame, "launch")) == ([2], [2])


def test_a_frame_says_whether_it_has_news() -> None:
    feed, timeline = StepFeed(), Timeline()
    assert feed.frame(timeline, STATS)[1]
    assert not feed.frame(timeline, STATS)[1]
    changed: Any = SimpleNamespace(**{**vars(STATS), "running": 1})
    assert feed.frame(timeline, changed)[1]
    assert not feed.frame(timeline, changed)[1]
    timeline.device.add("forward", 1, 0.0, 1.0)
    assert feed.frame(timeline, changed)[1]


def test_a_frame_is_bounded_and_says_what_it_leaves_out() -> None:
    feed, timeline = StepFeed(), Timeline()
    for step in range(3 * _MOST_EVENTS):
        timeline.loop.add("plan", step, step, step)
    # What happened before anyone watched is not left out.
    first = read(feed, timeline)
    assert steps(first) == [*range(2 * _MOST_EVENTS, 3 * _MOST_EVENTS)]
    assert first["left_out"] == 0
    for step in range(_MOST_EVENTS):
        timeline.loop.add("resolve", step, step, step)
    full = read(feed, timeline)
    assert (len(steps(full)), full["left_out"]) == (_MOST_EVENTS, 1)
    for step in range(_MOST_EVENTS - 1):
        timeline.loop.add("resolve", step, step, step)
    whole = read(feed, timeline)
    assert (len(steps(whole)), whole["left_out"]) == (_MOST_EVENTS - 1, 0)


def test_a_lane_that_is_cleared_and_another_timeline_begin_anew() -> None:
    feed, timeline = StepFeed(), Timeline()
    timeline.device.add("forward", 1, 0.0, 1.0)
    assert steps(read(feed, timeline), "device") == [1]
    timeline.device.clear()
    timeline.device.add("forward", 2, 1.0, 2.0)
    assert steps(read(feed, timeline), "device") == [2]
    other = Timeline()
    other.device.add("forward", 1, 3.0, 4.0)
    assert steps(read(feed, other), "device") == [1]


def test_a_thread_that_writes_meanwhile_loses_and_doubles_nothing() -> None:
    feed, timeline = StepFeed(), Timeline()
    count = 40_000
    read(feed, timeline)

    def write() -> None:
        for step in range(count):
            timeline.launch.add("launch", step, step, step)

    writer = threading.Thread(target=write)
    found: list[int] = []
    left_out = 0
    writer.start()
    while True:
        alive = writer.is_alive()
        frame = read(feed, timeline)
        # A lane that nothing was found in yet has nothing to leave out.
        left_out += frame["left_out"] or len(steps(frame, "launch")) == _MOST_EVENTS
        found += steps(frame, "launch")
        if not alive:
            break
    writer.join()
    assert found[-1] == count - 1
    assert all(a < b for a, b in pairwise(found)), "an event came twice"
    assert left_out or found == [*range(count)]
