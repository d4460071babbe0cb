"""Live steps and gauges of an engine as server-sent events, for the playground's timeline."""

from __future__ import annotations

import asyncio
import json
from dataclasses import fields
from typing import Any

from aiohttp import hdrs, web

from aioinfer.client.engine_like import EngineLike
from aioinfer.config import ServerConfig
from aioinfer.engine import EngineState
from aioinfer.observe.stats import EngineStats
from aioinfer.observe.timeline import Lane, Timeline, now
from aioinfer.server.http.access import WebAccess
from aioinfer.server.http.disconnects import ClientGone, Watcher
from aioinfer.server.http.failures import Failure, Refused
from aioinfer.server.http.keys import Keys
from aioinfer.server.http.sse import EventStream
from aioinfer.server.openapi.endpoints import Endpoint

__all__ = ["STEPS", "StepFeed", "Watching"]

STEPS = Endpoint(
    "GET",
    "/debug/steps",
    "Steps and gauges as they happen, as server-sent events without end",
    media="text/event-stream",
    statuses={429: "Too many clients watch.", 503: "The engine is not serving."},
    tag="status",
)

#: clients that may watch at the same time
_MOST_CLIENTS = 8
#: seconds between two frames, and between two that say the same
_INTERVAL, _IDLE_INTERVAL = 0.1, 1.0
#: events per lane and frame, which keep a frame at about 1 ms; older ones are left out
_MOST_EVENTS = 512
_GAUGES = tuple(item.name for item in fields(EngineStats) if item.name != "forward_seconds")

_Event = tuple[str, int, float, float]


class StepFeed:
    """Frames of one engine as JSON, each with the events since the frame before.

    Times are integers, in microseconds since the feed was made::

        {"t": 5120000, "left_out": 0, "stats": {"running": 2, ...},
         "lanes": {"loop": [["plan", 7, 5101200, 40], ...], "launch": [...], "device": [...]}}

    ``lanes`` has (name, step, start, duration) of events that have ended, oldest first; ``left_out`` is the
    number of lanes that had more than 512. ``stats`` has the gauges and counters of ``EngineStats``.
    """

    def __init__(self) -> None:
        self._origin = now()
        self._timeline: Timeline | None = None
        #: by lane, the last event of the frames so far
        self._last: dict[str, _Event] = {}
        self._stats: dict[str, Any] = {}

    def frame(self, timeline: Timeline, stats: EngineStats) -> tuple[str, bool]:
        """The next frame, and whether it differs from the one before."""
        if timeline is not self._timeline:
            self._timeline, self._last = timeline, {}
        lanes: dict[str, list[list[Any]]] = {}
        left_out = 0
        for lane in (timeline.loop, timeline.launch, timeline.device):
            last = self._last.get(lane.name)
            events, whole = _since(lane, last)
            if events:
                self._last[lane.name] = events[-1]
            left_out += not whole and last is not None
            lanes[lane.name] = [
                [what, step, self._micros(start), round(1e6 * (end - start))]
                for what, step, start, end in events
            ]
        gauges = {name: getattr(stats, name) for name in _GAUGES}
        news = gauges != self._stats or any(lanes.values())
        self._stats = gauges
        frame = {"t": self._micros(now()), "left_out": left_out, "stats": gauges, "lanes": lanes}
        return json.dumps(frame, separators=(",", ":")), news

    def _micros(self, moment: float) -> int:
        return round(1e6 * (moment - self._origin))


def _since(lane: Lane, last: _Event | None) -> tuple[list[_Event], bool]:
    """The events of a lane after ``last``, and whether these are all.

    Another thread appends meanwhile, which moves the others away from the end: one is then seen twice.
    """
    found: list[_Event] = []
    for back in range(1, _MOST_EVENTS + 1):
        try:
            event = lane.events[-back]
        except IndexError:  # fewer, or cleared by now
            break
        if event is last:
            break
        if not found or event is not found[-1]:
            found.append(event)
    else:
        return found[::-1], False
    return found[::-1], True


class Watching:
    """Sends the same frames to at most 8 clients, made by the first that asks for one.

    So the cost does not grow with their number, and there is none without clients. A client that reads slowly
    misses frames.
    """

    def __init__(self, engine: EngineLike, config: ServerConfig, keys: Keys) -> None:
        self._engine = engine
        self._config = config
        self._keys = keys
        self._access = WebAccess(config)
        self._feed = StepFeed()
        self._watcher = Watcher(min(config.ping_interval, config.send_timeout))
        #: clients that watch
        self.clients = 0
        self._closed = False
        self._frame = ""
        #: number of the interval that the newest frame was looked for in, and when it was made
        self._tick = -1
        self._made = 0.0

    async def close(self, app: web.Application | None = None) -> None:
        """End all streams within a frame, for good: the application shuts down."""
        self._closed = True

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Frames until the client leaves or the engine ends. Raises Refused (403, 429, 503)."""
        if not self._keys.given:
            self._access.check_local(request)
        if not self._open:
            raise _refused(503, "the engine is not serving", "service_unavailable_error", None)
        if self.clients >= _MOST_CLIENTS:
            message = f"{_MOST_CLIENTS} clients watch the engine already"
            raise _refused(429, message, "rate_limit_error", "too_many_clients")
        config = self._config
        events = EventStream(
            request, self._watcher, ping_interval=config.ping_interval, send_timeout=config.send_timeout
        )
        if request.method == hdrs.METH_HEAD:
            return events.response
        self.clients += 1
        try:
            async with events:
                await events.open()
                await self._send(events)
        except ClientGone:
            pass
        finally:
            self.clients -= 1
        return events.response

    async def _send(self, events: EventStream) -> None:
        clock = asyncio.get_running_loop().time
        sent = ""
        while self._open:
            frame = self._newest(clock())
            if frame is not sent:
                await events.send(frame)
                sent = frame
            # All clients wake up together, and the first of them makes the frame.
            await asyncio.sleep(_INTERVAL - clock() % _INTERVAL)
        await events.end("[DONE]")

    @property
    def _open(self) -> bool:
        return not self._closed and self._engine.state in (EngineState.RUNNING, EngineState.DRAINING)

    def _newest(self, time: float) -> str:
        tick = int(time / _INTERVAL)
        if tick != self._tick:
            self._tick = tick
            frame, news = self._feed.frame(self._engine.timeline, self._engine.stats())
            if news or time - self._made >= _IDLE_INTERVAL:
                self._frame, self._made = frame, time
        return self._frame


def _refused(status: int, message: str, kind: str, code: str | None) -> Refused:
    return Refused(Failure(status, kind, message, code=code, headers={"Retry-After": "5"}))
