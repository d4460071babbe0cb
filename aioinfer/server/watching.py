"""Watching an engine live: its steps and gauges as server-sent events."""

from __future__ import annotations

import asyncio

from aiohttp import hdrs, web

from aioinfer.config import ServerConfig
from aioinfer.engine import EngineState
from aioinfer.engine_like import EngineLike
from aioinfer.observe.feed import StepFeed
from aioinfer.server.http.access import WebAccess
from aioinfer.server.http.disconnects import ClientGone, Watcher
from aioinfer.server.http.failures import Failure, Refused
from aioinfer.server.http.keys import Keys
from aioinfer.server.http.sse import EventStream
from aioinfer.server.openapi.endpoints import Endpoint

__all__ = ["STEPS", "Watching"]

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
_WATCHED = (EngineState.RUNNING, EngineState.DRAINING)


class Watching:
    """Sends frames of a :class:`~aioinfer.observe.feed.StepFeed` to a bounded number of clients.

    All of them get the same frames, made by the first that asks for one, so the cost does not grow with
    their number, and there is none without clients. A client that reads slowly misses frames.
    """

    def __init__(self, engine: EngineLike, config: ServerConfig, keys: Keys) -> None:
        self._engine = engine
        self._config = config
        self._keys = keys
        self._access = WebAccess(config)
        self._feed = StepFeed()
        self._watcher = Watcher(min(config.ping_interval, config.send_timeout))
        self._clients = 0
        self._closed = False
        self._frame = ""
        #: number of the interval that the newest frame was looked for in, and when it was made
        self._tick = -1
        self._made = 0.0

    @property
    def clients(self) -> int:
        return self._clients

    async def close(self, app: web.Application | None = None) -> None:
        """End all streams within a frame, for good: the application shuts down."""
        self._closed = True

    async def respond(self, request: web.Request) -> web.StreamResponse:
        """Frames until the client leaves or the engine ends. Raises Refused (403, 429, 503)."""
        if not self._keys.given:
            self._access.check_local(request)
        if not self._open:
            raise Refused(_failure(503, "the engine is not serving", "service_unavailable_error", None))
        if self._clients >= _MOST_CLIENTS:
            message = f"{_MOST_CLIENTS} clients watch the engine already"
            raise Refused(_failure(429, message, "rate_limit_error", "too_many_clients"))
        self._clients += 1
        try:
            return await self._respond(request)
        finally:
            self._clients -= 1

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        config = self._config
        events = EventStream(
            request, self._watcher, ping_interval=config.ping_interval, send_timeout=config.send_timeout
        )
        if request.method == hdrs.METH_HEAD:
            return events.response
        try:
            async with events:
                await events.open()
                await self._send(events)
        except ClientGone:
            pass
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
        return not self._closed and self._engine.state in _WATCHED

    def _newest(self, time: float) -> str:
        tick = int(time / _INTERVAL)
        if tick != self._tick:
            self._tick = tick
            frame, news = self._feed.frame(self._engine.timeline, self._engine.stats())
            if news or time - self._made >= _IDLE_INTERVAL:
                self._frame, self._made = frame, time
        return self._frame


def _failure(status: int, message: str, kind: str, code: str | None) -> Failure:
    return Failure(status, kind, message, code=code, headers={"Retry-After": "5"})
