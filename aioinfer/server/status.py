"""Status: is the process alive, does the engine serve, which model and version it is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import PurePath
from typing import Literal

from aiohttp import web
from typing_extensions import TypedDict

from aioinfer._version import __version__
from aioinfer.client.engine_like import EngineLike
from aioinfer.config import ServerConfig
from aioinfer.engine import EngineState
from aioinfer.errors import EngineClosed
from aioinfer.ledger import Share
from aioinfer.outputs import AdapterInfo
from aioinfer.server.http.access import WebAccess
from aioinfer.server.http.failures import Failure, Refused
from aioinfer.server.http.keys import Keys
from aioinfer.server.http.pieces import whole_response
from aioinfer.server.images import reads_images
from aioinfer.server.openai.objects import Model, Models, Permission
from aioinfer.server.openai.protocol import model_not_found
from aioinfer.server.openapi.endpoints import Endpoint, Route

__all__ = ["HEALTH", "OPEN_PATHS", "TRACE", "Status", "send_trace"]


class Health(TypedDict):
    """``status`` is ``ok``, ``degraded`` if one of several engines does not serve and another does,
    ``stalled`` if steps do not finish, or the state of the engine."""

    status: str


class Live(TypedDict):
    status: Literal["ok"]


class Version(TypedDict):
    version: str


HEALTH = Endpoint(
    "GET",
    "/health",
    "Whether requests are accepted",
    answer=Health,
    answers={503: "No requests are accepted, or steps do not finish."},
    open=True,
    tag="status",
)
TRACE = Endpoint(
    "GET",
    "/debug/trace",
    "The latest steps as a Chrome trace",
    answer={},
    statuses={429: "Another trace is being made or sent."},
    tag="status",
)
_READY = replace(HEALTH, path="/readyz", place="root")
_PING = replace(_READY, path="/ping", summary="Whether requests are accepted, for SageMaker")
_LIVE = Endpoint("GET", "/livez", "The process is alive", answer=Live, open=True, place="root", tag="status")
_VERSION = Endpoint("GET", "/version", "The version of aioinfer", answer=Version, place="root", tag="status")
_MODELS = Endpoint("GET", "/models", "The served model and its adapters, as a list", answer=Models)
_MODEL = Endpoint("GET", "/models/{model}", "The served model, or an adapter", answer=Model)

#: paths of a server that monitors ask by any name, without a key and beyond the limit of connections
OPEN_PATHS = frozenset({HEALTH.path, _READY.path, _PING.path, _LIVE.path})


#: seconds between two pieces of a trace, in which the loop has the interpreter's lock
_PAUSE = 0.0005
#: traces that are being made and sent in this process; one is far smaller
_TRACES = Share("traces", bound=16 << 20)


async def send_trace(request: web.Request, engine: EngineLike, send_timeout: float) -> web.StreamResponse:
    """Make and send the trace of an engine, one at a time in a process. Raises Refused (429)."""
    assert _TRACES.bound is not None
    if not _TRACES.take(_TRACES.bound):
        headers, message = {"Retry-After": "5"}, "another trace is being made or sent"
        raise Refused(Failure(429, "rate_limit_error", message, code="one_trace_at_a_time", headers=headers))
    try:
        pieces = await asyncio.to_thread(_trace_of, engine)
        response = whole_response(request, pieces, send_timeout)
        await response.prepare(request)
        await response.write_eof()
        return response
    finally:
        _TRACES.give(_TRACES.bound)


def _trace_of(engine: EngineLike) -> list[bytes]:
    found = []
    for piece in engine.timeline.trace_pieces():
        found.append(piece.encode())
        time.sleep(_PAUSE)
    return found


class Status:
    """The handlers, of one engine."""

    def __init__(self, engine: EngineLike, config: ServerConfig, models: Sequence[str], keys: Keys) -> None:
        self._engine = engine
        self._config = config
        self._models = models
        self._keys = keys
        self._access = WebAccess(config)
        self._created = int(time.time())

    def routes(self) -> list[Route]:
        return [
            _MODELS.route(self.models),
            _MODEL.route(self.model),
            _READY.route(self.health),
            _PING.route(self.health),
            _LIVE.route(self.live),
            _VERSION.route(self.version),
        ]

    async def models(self, request: web.Request) -> web.StreamResponse:
        adapters = [self._adapter(each) for each in self._adapters()]
        data = [*map(self._body, self._models), *adapters]
        found: Models = {
            "object": "list",
            "data": data,
            "has_more": False,
            "first_id": data[0]["id"],
            "last_id": data[-1]["id"],
        }
        return web.json_response(found)

    async def model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["model"]
        if name in self._models:
            return web.json_response(self._body(name))
        for each in self._adapters():
            if each.name == name:
                return web.json_response(self._adapter(each))
        if not self._engine.ready:
            raise EngineClosed("the engine does not serve, and its adapters are not known")
        raise model_not_found(self._models[0], name)

    async def health(self, request: web.Request) -> web.StreamResponse:
        """200 while requests are accepted and steps finish, 503 otherwise."""
        status = self._status()
        return web.json_response({"status": status}, status=200 if status in ("ok", "degraded") else 503)

    def _status(self) -> str:
        engine = self._engine
        if not engine.ready:
            state = engine.state
            return "starting" if state is EngineState.RUNNING else state.value  # its only replica is
        stalled = [each.stalled > self._config.stall_timeout for each in engine.stats().parts]
        if all(stalled):
            return "stalled"
        return "degraded" if engine.degraded or any(stalled) else "ok"

    async def live(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def version(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"version": __version__})

    async def trace(self, request: web.Request) -> web.StreamResponse:
        """The latest steps as a Chrome trace, for Perfetto or chrome://tracing."""
        if not self._keys.given:
            self._access.check_local(request)
        return await send_trace(request, self._engine, self._config.send_timeout)

    def _adapters(self) -> list[AdapterInfo]:
        """Those that requests can select by a name of their own."""
        try:
            loaded = self._engine.adapters()
        except EngineClosed:  # it has not started
            return []
        return [each for each in loaded if each.name not in self._models]

    def _adapter(self, adapter: AdapterInfo) -> Model:
        """Its directory and the model that it belongs to are known by their names."""
        body = self._body(adapter.name)
        return {**body, "root": PurePath(adapter.path).name, "parent": self._models[0]}

    def _body(self, name: str) -> Model:
        info = self._engine.info if self._engine.ready else None
        longest = None if info is None else info.max_model_len
        body: Model = {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "aioinfer",
            "root": self._engine.config.model_name,
            "parent": None,
            "max_model_len": longest,
            "permission": [self._permission()],
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(self._created, UTC).isoformat(),
            "lifecycle": "active",
            "max_input_tokens": longest,
        }
        if info is not None:
            read: list[Literal["text", "image"]] = (
                ["text", "image"] if reads_images(self._engine) else ["text"]
            )
            body["architecture"] = {"input_modalities": read, "output_modalities": ["text"]}
        if info is not None and info.block_size is not None:
            body["block_size"] = info.block_size
        return body

    def _permission(self) -> Permission:
        return {
            "id": f"modelperm-{self._created}",
            "object": "model_permission",
            "created": self._created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
