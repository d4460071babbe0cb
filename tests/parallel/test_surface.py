"""What a dispatcher has and says: the names of an engine, statistics, metrics."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from dataclasses import asdict, fields
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry, generate_latest

from aioinfer import (
    ConfigError,
    EngineStats,
    InvalidRequest,
)
from aioinfer.engine import Engine
from aioinfer.parallel import Dispatcher
from aioinfer.parallel.replica import ReplicaState
from tests.observe.scrapes import read_text, scrape, values
from tests.parallel.toys import ENDLESS, PARAMS, STEP, Toy, end, prompt, toys, turn, virtual
from tests.tiers import SECONDS, rest

# -- surface -------------------------------------------------------------------------------------------

#: what an engine has and a dispatcher has not, and why
ONLY_ENGINES = {
    "observe": "steps are its engines': observe those; of requests, register() and measuring tell",
    "cached_tokens": "asks one prefix cache, and each engine has its own",
    "store_prefix": "each engine has its own prefix cache and stores",
    "in_thread": "makes an engine of a config",
}


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


def test_a_dispatcher_has_what_an_engine_has() -> None:
    missing = public(Engine).keys() - public(Dispatcher).keys()
    assert missing == ONLY_ENGINES.keys()
    attributes = {name for name in vars(Toy()) if not name.startswith("_")} - {"launches"}
    assert attributes <= vars(Dispatcher(toys(1))).keys()
    added = public(Dispatcher).keys() - public(Engine).keys()
    assert added == {"add", "remove", "restart"}


# -- statistics and metrics ----------------------------------------------------------------------------


@virtual
async def test_stats_are_sums_and_list_the_replicas() -> None:
    engines = toys(3)
    async with Dispatcher(engines, policy="round_robin") as dispatcher:
        await asyncio.gather(*(dispatcher.generate(prompt(number), PARAMS) for number in range(7)))
        running = [dispatcher.generate(prompt(number), ENDLESS) for number in range(5)]
        await asyncio.sleep(3 * STEP)
        stats, each = dispatcher.stats(), [engine.stats() for engine in engines]
        for field in fields(EngineStats):
            value = getattr(stats, field.name)
            if type(value) is int:
                assert value == sum(getattr(found, field.name) for found in each), field.name
        assert stats.state == "running"
        assert (stats.running, stats.output_tokens > 56) == (5, True)
        assert [found.name for found in stats.replicas] == ["local-0", "local-1", "local-2"]
        assert [found.stats for found in stats.replicas] == each
        assert [found.requests for found in stats.replicas] == [1, 2, 2]
        assert stats.ready_replicas == 3
        assert json.loads(json.dumps(asdict(stats)))["replicas"][1]["stats"]["running"] == 2
        await end(running)


@virtual
async def test_metrics_are_shown_until_the_dispatcher_is_closed() -> None:
    registry = CollectorRegistry()
    engines = toys(3)
    dispatcher = Dispatcher(engines, policy="round_robin")
    dispatcher.register(registry, engine="all", vllm=True)
    assert not scrape(registry)
    labels = frozenset({"model_name": "toy", "engine": "all"}.items())
    async with dispatcher:
        with pytest.raises(ConfigError, match="already"):
            dispatcher.register(registry, engine="again", vllm=True)
        streams = [dispatcher.generate(prompt(number), PARAMS) for number in range(6)]
        await asyncio.sleep(3.5 * STEP)
        engines[0].lose()
        await asyncio.gather(*streams)
        await turn()
        series = scrape(registry)
        for name, value in (
            ("aioinfer_resumed_total", 2),
            ("aioinfer_diverged_total", 0),
            ("aioinfer_request_output_tokens_sum", 48),
            ("aioinfer_time_to_first_token_seconds_count", 6),
            ("vllm:num_requests_running", 0),
        ):
            assert series[name, labels] == value, name
        assert 0 < series["aioinfer_resume_seconds_total", labels] < 10 * STEP
        states = {state: series["aioinfer_replicas", labels | {("state", state)}] for state in STATES}
        assert states == {"starting": 0, "ready": 2, "draining": 0, "lost": 1, "closed": 0}
        with pytest.raises(InvalidRequest):
            await dispatcher.generate([99], PARAMS)
        # An engine has none of these.
        engines[1].register(registry, engine="1", vllm=True)
        own = frozenset({"model_name": "toy", "engine": "1"}.items())
        series = scrape(registry)
        assert not [name for name, found in series if found >= own and "resum" in name]
        assert series["aioinfer_steps_total", own] > 0
    assert generate_latest(registry) == b""
    dispatcher.register(registry)
    await dispatcher.aclose()
    assert generate_latest(registry) == b"", "one that is not started leaves it, too"


STATES = tuple(state.value for state in ReplicaState)


@virtual
async def test_nothing_is_logged_while_nothing_is_wrong() -> None:
    lines: list[logging.LogRecord] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lines.append  # type: ignore[method-assign]
    logging.getLogger("aioinfer").addHandler(handler)
    try:
        async with Dispatcher(toys(2)) as dispatcher:
            streams = [dispatcher.generate(prompt(number), ENDLESS) for number in range(4)]
            await asyncio.sleep(3 * STEP)
            await dispatcher.restart()
            await dispatcher.remove("local-0")
            await end(streams)
    finally:
        logging.getLogger("aioinfer").removeHandler(handler)
    assert [each.getMessage() for each in lines] == []


@rest(SECONDS)
@virtual
async def test_counters_do_not_fall_when_engines_are_lost_restarted_and_removed() -> None:
    """Prometheus takes a counter that falls for one that began again, and its rate would leap."""
    registry = CollectorRegistry()
    engines = toys(3)
    labels = frozenset({"model_name": "toy", "engine": "0"}.items())
    async with Dispatcher(engines, policy="round_robin") as dispatcher:
        dispatcher.register(registry)
        before: dict[Any, float] = {}

        async def look(tokens: int) -> None:
            families = read_text(generate_latest(registry).decode())
            after = values(family for family in families if family.type in ("counter", "histogram"))
            assert before.keys() <= after.keys()
            assert not [key for key in before if after[key] < before[key]]
            assert after["aioinfer_output_tokens_total", labels] == tokens
            before.update(after)

        async def work() -> None:
            await asyncio.gather(*(dispatcher.generate(prompt(number), PARAMS) for number in range(6)))
            await turn()

        await work()
        await look(48)
        engines[0].lose()
        await look(48)
        await work()
        await look(96)
        await dispatcher.restart("local-0")
        await look(96)
        await dispatcher.restart()
        await work()
        await look(144)
        await dispatcher.remove("local-2")
        await look(144)
        await work()
        await look(192)
        steps = dispatcher.stats().steps
        assert before["aioinfer_steps_total", labels] == steps
        for name in ("aioinfer_step_tokens_count", "aioinfer_event_loop_lag_seconds_count"):
            assert before[name, labels] == before["aioinfer_steps_total", labels]


def test_a_stream_is_one_span_under_its_caller_whatever_becomes_of_its_attempts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    tracer = provider.get_tracer("application")
    engines = toys(2, tracing=True)

    @virtual
    async def ask() -> None:
        async with Dispatcher(engines, policy="round_robin") as dispatcher:

            async def caller(number: int) -> None:
                with tracer.start_as_current_span(f"caller {number}"):
                    messages: Any = [{"role": "user", "content": "abc"}]
                    await dispatcher.generate(messages if number else prompt(1), PARAMS)

            asking = [asyncio.ensure_future(caller(number)) for number in range(4)]
            await asyncio.sleep(3.5 * STEP)
            engines[0].lose()
            await asyncio.gather(*asking)
            await dispatcher.restart("local-0")
            await caller(4)

    ask()
    provider.shutdown()
    spans = exporter.get_finished_spans()
    callers = {span.context.span_id: span.name for span in spans if span.name.startswith("caller")}
    found = [span for span in spans if not span.name.startswith("caller")]
    parents = [callers[span.parent.span_id] for span in found if span.parent is not None]
    assert sorted(parents) == [f"caller {number}" for number in range(5)]
    assert sorted(span.name for span in found) == [*["chat toy"] * 4, "text_completion toy"]
    assert all((span.attributes or {})["gen_ai.usage.output_tokens"] == 8 for span in found)


@rest(SECONDS)
@virtual
async def test_one_line_tells_of_all_engines(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="aioinfer.stats"):
        async with Dispatcher(toys(3, stats_interval=1.0)) as dispatcher:
            streams = [dispatcher.generate(prompt(number), ENDLESS) for number in range(6)]
            await asyncio.sleep(2.5)
            await end(streams)
        await asyncio.sleep(5.0)
    lines = [each.getMessage() for each in caplog.records if each.name == "aioinfer.stats"]
    assert len(lines) == 2
    assert "running 6, waiting 0" in lines[0]
