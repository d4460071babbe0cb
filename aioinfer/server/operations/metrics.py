"""``GET /metrics``: the metrics of the served engine, for Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aiohttp import web

from aioinfer.client.engine_like import EngineLike
from aioinfer.config import ServerConfig
from aioinfer.server.http.access import WebAccess
from aioinfer.server.http.keys import Keys
from aioinfer.server.openapi.endpoints import Endpoint

if TYPE_CHECKING:
    from aioinfer.observe.metrics.recorder import Snapshot

__all__ = ["METRICS", "Metrics"]

METRICS = Endpoint(
    "GET", "/metrics", "What Prometheus scrapes", media="text/plain", answer=None, tag="status"
)

_ENGINE = "0"


class Metrics:
    """Answers scrapes in the text format or, if ``Accept`` asks for it, in OpenMetrics."""

    def __init__(self, engine: EngineLike, config: ServerConfig, model: str, keys: Keys) -> None:
        self._engine = engine
        self._model = model
        self._vllm = config.vllm_metrics
        self._keys = keys
        self._access = WebAccess(config)
        _ = engine.measuring  # histograms count from the first request on

    async def scrape(self, request: web.Request) -> web.StreamResponse:
        """Load and sizes are no content, but no business of web pages either."""
        if not self._keys.given:
            self._access.check_local(request)
        accept = ",".join(request.headers.getall("Accept", ()))
        # Read in one moment on the loop, and rendered elsewhere: that takes milliseconds.
        measuring = self._engine.measuring
        body, kind = await asyncio.to_thread(
            _render, measuring.snapshot(), measuring.facts, self._model, accept, self._vllm
        )
        return web.Response(body=body, headers={"Content-Type": kind})

    def called(self, n: int) -> None:
        """A call asks for ``n`` choices."""
        recorder = self._engine.measuring.recorder
        if recorder is not None:
            recorder.called(n)


def _render(
    snapshot: Snapshot | None, facts: Mapping[str, str], model: str, accept: str, vllm: bool
) -> tuple[bytes, str]:
    from aioinfer.observe.metrics.collector import Labels, Reading, render  # imports prometheus_client

    readings = [] if snapshot is None else [Reading(Labels(model, _ENGINE), snapshot, facts)]
    return render(readings, accept, vllm=vllm)
