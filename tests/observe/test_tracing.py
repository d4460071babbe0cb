"""Tracing: one span per request, of the right parent, with its times and counts and none of its content."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from aioinfer import SamplingParams
from aioinfer.engine import Engine
from aioinfer.errors import TimedOut
from aioinfer.observe import tracing
from tests.observe.scrapes import toy_engine
from tests.tiers import SECONDS, rest

SECRET = "abracadabra"
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True, stop=("zzz" + SECRET,), seed=7)
REMOTE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Spans:
    """What the application's provider was given."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def found(self) -> list[ReadableSpan]:
        return [span for span in self.exporter.get_finished_spans() if span.name != "caller"]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Spans]:
    """A provider that the application has set, for this test."""
    spans = Spans()
    monkeypatch.setattr(trace, "get_tracer", spans.provider.get_tracer)
    yield spans
    spans.provider.shutdown()


def traced_engine() -> Engine:
    return toy_engine(tracing=True)


async def test_a_request_is_a_span_with_its_figures_and_times(spans: Spans) -> None:
    before = time.time_ns()
    async with traced_engine() as engine:
        result = await engine.generate([{"role": "user", "content": SECRET}], PARAMS)
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    chat, text = spans.found
    assert chat.name == "chat toy"
    assert text.name == "text_completion toy"
    assert chat.kind is SpanKind.INTERNAL
    attributes = dict(chat.attributes or {})
    assert attributes.pop("gen_ai.response.time_to_first_chunk") == pytest.approx(
        result.metrics.ttft if result.metrics else None
    )
    assert attributes == {
        "aioinfer.request.id": result.request_id,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "aioinfer",
        "gen_ai.request.model": "toy",
        "gen_ai.request.max_tokens": 6,
        "gen_ai.request.seed": 7,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": result.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    assert SECRET not in chat.to_json()
    assert [event.name for event in chat.events] == ["admitted", "first token"]
    assert chat.start_time is not None
    assert chat.end_time is not None
    times = [chat.start_time, *(event.timestamp for event in chat.events), chat.end_time]
    assert times == sorted(times)
    # Wall clocks can be set back and forth while a test runs, but not by an hour.
    assert abs(chat.start_time - before) < 3600e9
    assert chat.status.status_code is StatusCode.UNSET


async def test_spans_are_children_of_what_was_current_where_the_request_was_made(spans: Spans) -> None:
    tracer = spans.provider.get_tracer("application")
    async with traced_engine() as engine:

        async def job(name: str) -> int:
            with tracer.start_as_current_span("caller") as span:
                await engine.generate([1, 2, 3], PARAMS)
                return span.get_span_context().span_id

        parents = await asyncio.gather(*(job(str(index)) for index in range(5)))
        await engine.generate([1, 2, 3], PARAMS)
    found = [span.parent and span.parent.span_id for span in spans.found]
    assert sorted(parents) == sorted(filter(None, found))
    assert found[-1] is None


async def test_a_call_that_names_a_trace_is_a_server_span_in_it(spans: Spans) -> None:
    async with traced_engine() as engine:
        with tracing.within({"traceparent": REMOTE}, "id-1"):
            await engine.generate([1, 2, 3], PARAMS)
        with tracing.within({"traceparent": "nonsense"}, "id-2"):
            await engine.generate([1, 2, 3], PARAMS)
        with (
            spans.provider.get_tracer("application").start_as_current_span("caller") as current,
            tracing.within({"traceparent": REMOTE}, "id-1"),
        ):
            await engine.generate([1, 2, 3], PARAMS)
    remote, alone, inner = spans.found
    assert remote.kind is SpanKind.SERVER
    assert remote.parent is not None
    assert f"{remote.parent.span_id:016x}" == "b7ad6b7169203331"
    assert f"{remote.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert alone.parent is None
    called = [dict(span.attributes or {})["aioinfer.request.id"] for span in spans.found]
    assert called == ["id-1", "id-2", "id-1"]
    assert inner.parent is not None
    assert inner.parent.span_id == current.get_span_context().span_id, "a server's own span is nearer"


async def test_a_failure_is_an_error_by_its_type_without_its_message(spans: Spans) -> None:
    async with traced_engine() as engine:
        await engine.pause()
        stream = engine.generate([1, 2, 3], PARAMS, waiting_timeout=1e-9)
        with pytest.raises(TimedOut):
            await stream
        engine.resume()
        engine.generate([1, 2, 3], PARAMS).close()
    failed, closed = spans.found
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.status.description is None
    assert dict(failed.attributes or {})["error.type"] == "TimedOut"
    assert dict(closed.attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)
    assert closed.status.status_code is StatusCode.UNSET
    assert not closed.events


class Failing(SpanProcessor):
    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("the exporter is broken")


async def test_a_broken_exporter_ends_the_tracing_and_no_request(
    spans: Spans, caplog: pytest.LogCaptureFixture
) -> None:
    spans.provider.add_span_processor(Failing())
    async with traced_engine() as engine:
        for _ in range(3):
            assert len((await engine.generate([1, 2, 3], PARAMS)).token_ids) == 6
    assert len(spans.found) == 1
    assert "Tracer raised and is switched off" in caplog.text


async def test_nothing_of_an_ended_request_is_kept(spans: Spans) -> None:
    async with traced_engine() as engine:
        tracer = engine._serving().observers.find(tracing.Tracer)
        assert tracer is not None
        streams = [engine.generate([1, 2, 3], PARAMS) for _ in range(3)]
        assert len(tracer._opened) == 3
        for stream in streams:
            await stream
        assert not tracer._opened
    assert len(spans.found) == 3


async def test_without_the_setting_there_is_no_span(spans: Spans) -> None:
    async with toy_engine() as engine:
        await engine.generate([1, 2, 3], PARAMS)
    assert not spans.found


@rest(SECONDS)
def test_without_the_extra_the_setting_is_refused_before_the_model_loads() -> None:
    code = (
        "import asyncio, sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from aioinfer import Engine, EngineConfig\n"
        "from aioinfer.errors import ConfigError\n"
        "async def main():\n"
        "    try: await Engine(EngineConfig(tracing=True)).start()\n"
        "    except ConfigError as error: return str(error)\n"
        "print(asyncio.run(main()), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "tracing needs the extra: pip install 'aioinfer[tracing]' False\n"
