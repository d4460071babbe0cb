"""The feed of steps: every event once and in order; bounded, guarded, and closed with its engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from aioinfer.observe.timeline import Timeline
from aioinfer.params import SamplingParams
from aioinfer.server import setup
from aioinfer.server.watching import (
    _GAUGES,
    _IDLE_INTERVAL,
    _INTERVAL,
    _MOST_CLIENTS,
    _MOST_EVENTS,
    StepFeed,
    Watching,
)
from tests.engine.simulation import settle
from tests.server.conftest import Connect, Serving
from tests.server.raw import request
from tests.server.test_adversity import until
from tests.server.test_mounting import make_engine, running
from tests.tiers import SECONDS, rest

WORK = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
#: what the feed reads of an engine at rest
STATS: Any = SimpleNamespace(**dict.fromkeys(_GAUGES, 0))


class Feed:
    """A client that watches."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        #: the feed has ended, and said so
        self.done = False

    async def frame(self) -> dict[str, Any] | None:
        """The next frame; None at the end."""
        async for line in self.response.content:
            if line == b"data: [DONE]\n":
                self.done = True
            elif line.startswith(b"data: "):
                frame: dict[str, Any] = json.loads(line[6:])
                return frame
        return None

    async def frames(self, enough: int) -> list[dict[str, Any]]:
        """Frames up to the one that says that so many requests have finished and nothing is in flight."""
        found = []
        while (frame := await self.frame()) is not None:
            found.append(frame)
            if frame["stats"]["finished"] >= enough and not frame["stats"]["steps_in_flight"]:
                break
        return found


@asynccontextmanager
async def watch(url: str, **headers: str) -> AsyncIterator[Feed]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{url}/debug/steps", headers=headers) as response,
    ):
        yield Feed(response)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Watching]:
    """The feeds of all servers that start in the test."""
    found: list[Watching] = []
    original = Watching.__init__

    def noted(self: Watching, *arguments: Any) -> None:
        original(self, *arguments)
        found.append(self)

    monkeypatch.setattr(Watching, "__init__", noted)
    return found


async def test_the_steps_of_a_server_arrive_once_and_in_order(serving: Serving) -> None:
    async with serving() as served, watch(served.url) as feed:
        assert feed.response.content_type == "text/event-stream"
        first = await feed.frame()
        assert first["stats"]["finished"] == 0
        await served.engine.generate([1, 2], WORK)
        await settle(served.engine)
        frames = [first, *await feed.frames(1)]
        stats = served.engine.stats()
    assert all(frame["left_out"] == 0 for frame in frames)
    for lane in ("loop", "launch", "device"):
        events = [event for frame in frames for event in frame["lanes"][lane]]
        assert len({(name, step) for name, step, *_ in events}) == len(events), "an event came twice"
        assert {step for _, step, *_ in events} == set(range(1, stats.steps + 1))
        ends = [start + length for *_, start, length in events]
        assert all(a <= b + 1 for a, b in pairwise(ends))  # rounded
    times = [frame["t"] for frame in frames]
    assert times == sorted(times)
    last = frames[-1]["stats"]
    assert set(last) == set(_GAUGES)
    assert (last["output_tokens"], last["state"], last["pages_private"]) == (20, "running", 0)


async def test_clients_get_the_same_frames_in_their_intervals(made: list[Watching], serving: Serving) -> None:
    async with serving() as served:
        (watching,) = made
        frame = watching._newest(1000.0)
        assert watching._newest(1000.0 + 0.9 * _INTERVAL) is frame
        # Nothing has happened: the same again until a second has passed.
        assert watching._newest(1000.0 + 5.5 * _INTERVAL) is frame
        later = watching._newest(1000.0 + _IDLE_INTERVAL + 0.5 * _INTERVAL)
        assert later is not frame
        await served.engine.generate([1, 2], WORK)
        await settle(served.engine)
        assert watching._newest(1000.0 + _IDLE_INTERVAL + 1.5 * _INTERVAL) is not later


async def test_nothing_is_computed_when_nobody_watches(
    serving: Serving, made: list[Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    original = StepFeed.frame

    def counted(self: StepFeed, *arguments: Any) -> tuple[str, bool]:
        computed.append(1)
        return original(self, *arguments)

    monkeypatch.setattr(StepFeed, "frame", counted)
    async with serving() as served:
        tasks = asyncio.all_tasks()
        await served.engine.generate([1, 2], WORK)
        assert not computed
        async with watch(served.url) as feed:
            await feed.frame()
            assert computed
        await until(lambda: made[0].clients == 0)
        computed.clear()
        await served.engine.generate([1, 2], WORK)
        await until(lambda: len(asyncio.all_tasks()) <= len(tasks))
        assert not computed


@rest(SECONDS)
async def test_the_number_of_clients_is_bounded(serving: Serving, made: list[Watching]) -> None:
    async with serving() as served, AsyncExitStack() as stack:
        feeds = [await stack.enter_async_context(watch(served.url)) for _ in range(_MOST_CLIENTS)]
        for feed in feeds:
            assert await feed.frame() is not None
        async with watch(served.url) as refused:
            assert refused.response.status == 429
            assert refused.response.headers["Retry-After"] == "5"
            assert (await refused.response.json())["error"]["code"] == "too_many_clients"
        feeds[3].response.close()
        await until(lambda: made[0].clients < _MOST_CLIENTS)
        async with watch(served.url) as another:
            assert await another.frame() is not None
        # A refused client is not counted, and those that watch go on.
        assert await feeds[0].frame() is not None


@rest(SECONDS)
async def test_a_client_that_does_not_read_misses_frames_and_is_dropped(
    serving: Serving, connect: Connect, made: list[Watching], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    def large(*_: Any) -> tuple[str, bool]:
        computed.append(1)
        return "x" * 2_000_000 + str(len(computed)), True

    monkeypatch.setattr(StepFeed, "frame", large)
    async with serving(server={"send_timeout": 0.5}) as served:
        raw = await connect(served)
        await raw.send(request(path="/debug/steps"))
        await until(lambda: made[0].clients == 1)
        await until(lambda: made[0].clients == 0)
        # One frame filled the buffers of the connection, or a few: none was made to wait in a queue.
        assert len(computed) <= 8


async def test_a_head_of_the_feed_has_no_body(serving: Serving, connect: Connect) -> None:
    async with serving() as served, asyncio.timeout(60):
        raw = await connect(served)
        for path in ("/debug/steps", "/health"):  # what comes second begins where the first has ended
            await raw.send(request("HEAD", path))
            head = await raw.head()
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert b"Content-Type: application/json" in head


async def test_the_feed_requires_the_api_key_or_a_local_name(serving: Serving) -> None:
    """Also in an application that checks no hosts itself."""
    async with serving(server={"api_key": "secret"}) as served:
        async with watch(served.url) as feed:
            assert feed.response.status == 401
        async with watch(served.url, Authorization="Bearer secret") as feed:
            assert await feed.frame() is not None
    app = web.Application()
    setup(app, make_engine())
    async with running(app) as url:
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            async with watch(url, **headers) as feed:
                assert feed.response.status == 403
        async with watch(url) as feed:
            assert await feed.frame() is not None


async def test_a_server_that_stops_ends_the_feed(serving: Serving) -> None:
    async with serving() as served, watch(served.url) as feed:
        assert await feed.frame() is not None
        served.running.stop.set()
        while await feed.frame() is not None:
            pass
        assert feed.done
        await served.running.task


async def test_an_application_that_shuts_down_ends_the_feed_of_an_engine_that_goes_on() -> None:
    app = web.Application()
    async with make_engine() as engine:
        setup(app, engine)
        async with running(app) as url, asyncio.timeout(60):
            feeding = watch(url)
            feed = await feeding.__aenter__()
            assert await feed.frame() is not None
        # ``running`` has returned: no handler was waited for until aiohttp's timeout of 60 seconds.
        while await feed.frame() is not None:
            pass
        assert feed.done
        await feeding.__aexit__(None, None, None)
        assert engine.ready


async def test_an_engine_that_does_not_serve_has_no_feed() -> None:
    app = web.Application()
    engine = make_engine()
    setup(app, engine)
    async with running(app) as url:
        await engine.aclose()
        async with watch(url) as feed:
            assert feed.response.status == 503
            assert feed.response.headers["Retry-After"] == "5"


# -- its frames -----------------------------------------------------------------------------------------


def read(feed: StepFeed, timeline: Timeline, stats: Any = STATS) -> dict[str, Any]:
    frame: dict[str, Any] = json.loads(feed.frame(timeline, stats)[0])
    return frame


def steps_of(frame: dict[str, Any], lane: str = "loop") -> list[int]:
    return [event[1] for event in frame["lanes"][lane]]


def test_a_frame_is_bounded_and_says_what_it_leaves_out() -> None:
    feed, timeline = StepFeed(), Timeline()
    for step in range(3 * _MOST_EVENTS):
        timeline.loop.add("plan", step, step, step)
    # What happened before anyone watched is not left out.
    first = read(feed, timeline)
    assert steps_of(first) == [*range(2 * _MOST_EVENTS, 3 * _MOST_EVENTS)]
    assert first["left_out"] == 0
    for step in range(_MOST_EVENTS):
        timeline.loop.add("resolve", step, step, step)
    full = read(feed, timeline)
    assert (len(steps_of(full)), full["left_out"]) == (_MOST_EVENTS, 1)
    for step in range(_MOST_EVENTS - 1):
        timeline.loop.add("resolve", step, step, step)
    whole = read(feed, timeline)
    assert (len(steps_of(whole)), whole["left_out"]) == (_MOST_EVENTS - 1, 0)


def test_a_lane_that_is_cleared_and_another_timeline_begin_anew() -> None:
    feed, timeline = StepFeed(), Timeline()
    timeline.device.add("forward", 1, feed._origin + 1.0, feed._origin + 1.00025)
    assert read(feed, timeline)["lanes"]["device"] == [["forward", 1, 1_000_000, 250]]  # microseconds
    timeline.device.clear()
    timeline.device.add("forward", 2, 1.0, 2.0)
    assert steps_of(read(feed, timeline), "device") == [2]
    other = Timeline()
    other.device.add("forward", 1, 3.0, 4.0)
    assert steps_of(read(feed, other), "device") == [1]


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
        left_out += frame["left_out"] or len(steps_of(frame, "launch")) == _MOST_EVENTS
        found += steps_of(frame, "launch")
        if not alive:
            break
    writer.join()
    assert found[-1] == count - 1
    assert all(a < b for a, b in pairwise(found)), "an event came twice"
    assert left_out or found == [*range(count)]
