"""/metrics: scrapes of a real server, in both formats, for those who may."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import Any

import pytest
from aiohttp import web
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from aioinfer.config import ServerConfig
from aioinfer.errors import ConfigError
from aioinfer.server import setup
from tests.observe.scrapes import read_openmetrics, read_text, toy_engine, values
from tests.server.conftest import Served, Serving
from tests.tiers import SECONDS, rest

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0, text/plain; q=0.5"}
MESSAGES = [{"role": "user", "content": "hello"}]


async def ask(served: Served, **body: Any) -> None:
    question = {"model": "toy", "messages": MESSAGES, "max_tokens": 5, "ignore_eos": True, **body}
    assert (await served.post("/v1/chat/completions", question)).status == 200


async def test_a_scrape_has_what_was_served_in_both_formats(serving: Serving) -> None:
    async with serving(server={"served_model_name": "a/b"}) as served:
        await ask(served, model="a/b", n=3)
        await ask(served, model="a/b", stream=True)
        scrape = await served.get("/metrics")
        assert (scrape.status, scrape.headers["Content-Type"]) == (
            *(200, "text/plain; version=0.0.4; charset=utf-8"),
        )
        series = values(read_text(scrape.text))
        own = {"model_name": "a/b", "engine": "0"}
        for name, value in (
            ("aioinfer_output_tokens_total", served.engine.stats().output_tokens),
            ("vllm:generation_tokens_total", 20),
            ("aioinfer_request_choices_sum", 4),
            ("vllm:request_params_n_count", 2),
            ("aioinfer_request_max_tokens_sum", 20),
            ("aioinfer_stream_backlog_tokens", 0),
        ):
            assert series[name, frozenset(own.items())] == value, name
        opened = await served.get("/metrics", **OPENMETRICS)
        kind = "application/openmetrics-text; version=1.0.0; charset=utf-8"
        assert (opened.status, opened.headers["Content-Type"]) == (200, kind)
        assert opened.text.endswith("# EOF\n")
        assert values(read_openmetrics(opened.text)).keys() == series.keys()
        for nonsense in ("text/plain; version=abc", "application/openmetrics-text; version=x", ";;,"):
            scrape = await served.get("/metrics", Accept=nonsense)
            assert (scrape.status, "aioinfer_steps_total" in scrape.text) == (200, True)


async def test_the_names_of_vllm_and_the_route_can_be_left_out(serving: Serving) -> None:
    async with serving(server={"vllm_metrics": False}) as served:
        text = (await served.get("/metrics")).text
        assert "aioinfer_steps_total" in text
        assert "vllm" not in text
    async with serving(server={"metrics": False}) as served:
        assert (await served.get("/metrics")).status == 404
        await ask(served)
        assert served.engine._measuring is None


async def test_metrics_are_for_those_with_the_key_or_on_this_machine(serving: Serving) -> None:
    async with serving(server={"api_key": "secret"}) as served:
        for key, status in (("wrong", 401), ("secret", 200)):
            assert (await served.get("/metrics", Authorization=f"Bearer {key}")).status == status
    async with serving() as served:
        assert (await served.get("/metrics", Origin="https://evil.example")).status == 403
        assert (await served.get("/metrics", Host="rebound.example")).status == 403
        assert (await served.get("/metrics", Host="127.0.0.1")).status == 200


async def test_a_mounted_engine_has_its_metrics_beside_its_health() -> None:
    app = web.Application()
    setup(app, toy_engine(), prefix="/a/v1")
    setup(app, toy_engine(), prefix="/b/v1")
    paths = {route.resource.canonical for route in app.router.routes() if route.resource is not None}
    assert {"/a/metrics", "/b/metrics"} <= paths
    taken = web.Application()

    async def own(request: web.Request) -> web.Response:
        return web.Response(text="the application's")

    taken.router.add_get("/metrics", own)
    with pytest.raises(ConfigError, match=r"route /metrics: .*metrics=False"):
        setup(taken, toy_engine())
    setup(taken, toy_engine(), config=ServerConfig(metrics=False))


@rest(SECONDS)
async def test_scrapes_while_requests_run_are_whole_and_never_fall(serving: Serving) -> None:
    async with serving() as served:
        streamed = [index % 2 == 0 for index in range(12)]
        asking = [asyncio.create_task(ask(served, max_tokens=40, stream=stream)) for stream in streamed]
        before: dict[Any, float] = {}
        while not all(task.done() for task in asking):
            families = read_text((await served.get("/metrics")).text)
            counting = values(family for family in families if family.type in ("counter", "histogram"))
            assert not [key for key, value in before.items() if counting[key] < value]
            before = counting
        await asyncio.gather(*asking)


async def test_a_scrape_of_an_engine_that_is_closed_is_empty_and_no_error(serving: Serving) -> None:
    async with serving() as served:
        await ask(served)
        await served.engine.aclose()
        scrape = await served.get("/metrics")
        assert (scrape.status, values(read_text(scrape.text))) == (200, {})


@rest(SECONDS)
async def test_spans_of_calls_belong_to_the_trace_of_their_client(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serving(tracing=True) as served:
        for headers in ({"traceparent": parent, "x-request-id": "mine"}, {}):
            body = {"model": "toy", "messages": MESSAGES, "max_tokens": 2, "n": 2, "ignore_eos": True}
            assert (await served.post("/v1/chat/completions", body, **headers)).status == 200
    spans = exporter.get_finished_spans()
    traces = [f"{span.context.trace_id:032x}" for span in spans]
    assert traces[:2] == ["0af7651916cd43dd8448eb211c80319c"] * 2
    assert all(span.name == "chat toy" for span in spans)
    ids = [dict(span.attributes or {})["aioinfer.request.id"] for span in spans]
    assert ids[:2] == ["mine", "mine"]
    assert ids[2] == ids[3] not in ("mine", "")
    assert all(span.parent is None for span in spans[2:]), "a trace ends with its call"
    provider.shutdown()


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, which Debian has")
def test_promtool_accepts_a_scrape() -> None:
    """tests/observe/test_metrics.py has its checks of names without it."""

    async def text() -> str:
        registry = CollectorRegistry()
        engine = toy_engine()
        engine.register(registry)
        async with engine:
            return generate_latest(registry).decode()

    done = subprocess.run(
        ["promtool", "check", "metrics"], input=asyncio.run(text()), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
