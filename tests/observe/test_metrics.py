"""Metrics: names and types as promtool wants them, values as stats() has them, registries of applications."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Gauge, generate_latest

from aioinfer import EngineStats, SamplingParams
from aioinfer.engine import Engine, EngineState
from aioinfer.errors import ConfigError
from aioinfer.observe.metrics.catalogue import _STATES, OWN, VLLM, Value
from aioinfer.observe.metrics.collector import Labels, Reading, render
from aioinfer.observe.metrics.recorder import CAUSES, FINISH_REASONS
from tests.observe.scrapes import Series, lint, read_openmetrics, read_text, scrape, toy_engine, values
from tests.tiers import SECONDS, rest

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
#: of Prometheus 3
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
#: what a board for vLLM queries: its names by type
BOARD = {
    "gauge": ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    "counter": (
        "prompt_tokens_total", "generation_tokens_total", "request_success_total", "num_preemptions_total",
        "prefix_cache_queries_total", "prefix_cache_hits_total",
    ),
    "histogram": (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_prompt_tokens",
        "request_generation_tokens", "iteration_tokens_total", "request_params_n",
        "request_params_max_tokens", "time_per_output_token_seconds",
    ),
}  # fmt: skip


def own(series: Series, name: str, **labels: str) -> float:
    """The sample of an engine with the default labels."""
    return series[name, frozenset({"model_name": "toy", "engine": "0", **labels}.items())]


@asynccontextmanager
async def measured(registry: CollectorRegistry, *, vllm: bool = True) -> AsyncIterator[Engine]:
    """An engine in a registry that has answered two requests."""
    engine = toy_engine()
    engine.register(registry, vllm=vllm)
    async with engine:
        for _ in range(2):
            await engine.generate([1, 2, 3, 4, 5, 6, 7, 8, 9], PARAMS)
        recorder = engine.measuring.recorder
        assert recorder is not None
        while not recorder.counted or engine.stats().steps_in_flight:
            await asyncio.sleep(0)
        yield engine


# -- names ---------------------------------------------------------------------------------------------


async def test_promtool_has_nothing_to_say_of_our_names() -> None:
    registry = CollectorRegistry()
    async with measured(registry, vllm=False):
        found = read_text(generate_latest(registry).decode())
    assert len(found) == len(OWN) + 1
    complaints = {family.name: wrong for family in found if (wrong := lint(family))}
    assert not complaints


async def test_both_formats_say_the_same_with_types_help_and_units() -> None:
    registry = CollectorRegistry()
    async with measured(registry) as engine:
        snapshot = engine.measuring.snapshot()
        facts = engine.measuring.facts
    assert snapshot is not None
    readings = [Reading(Labels("toy", "0"), snapshot, facts)]
    text, text_type = render(readings, "", vllm=True)
    opened, opened_type = render(readings, OPENMETRICS, vllm=True)
    assert text_type.startswith("text/plain; version=0.0.4")
    assert opened_type.startswith("application/openmetrics-text; version=1.0.0")
    assert render(readings, PROMETHEUS, vllm=True) == (opened, opened_type)
    assert render(readings, "text/html, */*", vllm=True) == (text, text_type)
    families = read_openmetrics(opened.decode())
    assert values(families) == values(read_text(text.decode()))
    entries = {entry.name: entry for entry in (*OWN, *VLLM)}
    facts_of = {"aioinfer_engine", "vllm:cache_config_info"}
    assert {family.name for family in families} == {*entries, *facts_of}, "no name lost its colon"
    for family in families:
        if family.name in facts_of:
            continue
        entry = entries[family.name]
        kind = entry.kind if isinstance(entry, Value) else "histogram"
        assert (family.type, family.documentation, family.unit) == (kind, entry.help, entry.unit)
        assert entry.help.endswith(".")


async def test_boards_for_vllm_find_their_names_labels_and_bounds() -> None:
    registry = CollectorRegistry()
    async with measured(registry):
        found = read_text(generate_latest(registry).decode())
    types = {family.name: family.type for family in found}
    for kind, names in BOARD.items():
        for name in names:
            assert types[f"vllm:{name.removesuffix('_total') if kind == 'counter' else name}"] == kind
    series = values(found)
    for (name, labels), _ in series.items():
        assert {"model_name", "engine"} <= {label for label, _ in labels}, name
    bounds = [
        float(dict(labels)["le"])
        for (name, labels) in series
        if name == "vllm:request_queue_time_seconds_bucket"
    ]
    assert bounds[:3] == [0.3, 0.5, 0.8]
    assert bounds[-2:] == [7680.0, float("inf")]
    assert own(series, "vllm:request_success_total", finished_reason="length") == 2
    assert own(series, "vllm:generation_tokens_total") == 12
    assert own(series, "vllm:prefix_cache_hits_total") == 8
    assert own(series, "vllm:inter_token_latency_seconds_count") == 10
    assert own(series, "vllm:time_per_output_token_seconds_count") == 10


# -- values --------------------------------------------------------------------------------------------


def test_every_number_of_stats_is_a_metric() -> None:
    shown = {entry.field for entry in OWN if isinstance(entry, Value)}
    pages = {"pages_free", "pages_fenced", "pages_private", "pages_cached"}
    fields = {item.name for item in dataclasses.fields(EngineStats)}
    assert fields - shown - pages == {"state", "policy"}
    assert shown - fields - {None} == {"kv_usage"}


async def test_what_is_scraped_is_what_stats_says() -> None:
    registry = CollectorRegistry()
    async with measured(registry) as engine:
        stats, series = engine.stats(), scrape(registry)
        for entry in OWN:
            if isinstance(entry, Value) and entry.field is not None and entry.label is None:
                suffix = "_total" if entry.kind == "counter" else ""
                if entry.field != "stalled":
                    assert own(series, entry.name + suffix) == float(getattr(stats, entry.field)), entry.name
        assert sum(own(series, "aioinfer_kv_pages", state=state) for state in ("free", "cached")) == 64
        assert own(series, "aioinfer_engine_state", state="running") == 1
        assert own(series, "aioinfer_request_output_tokens_sum") == stats.output_tokens == 12
        assert own(series, "aioinfer_step_tokens_count") == stats.steps
        assert own(series, "aioinfer_event_loop_lag_seconds_count") == stats.steps
        ended = [own(series, "aioinfer_requests_ended_total", finish_reason=each) for each in FINISH_REASONS]
        assert ended == [0, 2, 0]
        assert all(own(series, "aioinfer_aborts_total", cause=cause) == 0 for cause in CAUSES)


@rest(SECONDS)
async def test_counters_and_buckets_never_fall_from_scrape_to_scrape() -> None:
    registry = CollectorRegistry()
    async with measured(registry) as engine:
        before = scrape(registry)
        for round in range(6):
            streams = [engine.generate([round, index, 3, 4], PARAMS) for index in range(4)]
            await streams[0]
            streams[1].close()
            engine.flush_cache()
            families = read_text(generate_latest(registry).decode())
            after = values(families)
            counting = values(family for family in families if family.type in ("counter", "histogram"))
            # Of memory, shares end with what they stand for, whichever engine's that was.
            assert {key for key in before if "_memory_" not in key[0]} <= after.keys()
            assert not [key for key in counting if after[key] < before[key]]
            for stream in streams[2:]:
                await stream
            before = after


def test_labels_have_few_values() -> None:
    assert set(_STATES) == {state.value for state in EngineState}
    assert len(set(CAUSES)) == len(CAUSES) < 20
    label_names = {entry.label for entry in (*OWN, *VLLM) if isinstance(entry, Value)}
    # Of "part": the parts of a forward that the kernels know.
    assert label_names == {None, "share", "state", "finish_reason", "finished_reason", "cause", "part"}


# -- registries ----------------------------------------------------------------------------------------


async def test_engines_of_one_registry_are_told_apart_and_leave_it_when_they_close() -> None:
    registry = CollectorRegistry()
    first, second = toy_engine(), toy_engine()
    first.register(registry)
    second.register(registry, engine="1", model_name="other")
    names = {name for name, _ in scrape(registry)}
    assert not names, "before the start there is nothing to show"
    async with first, second:
        await second.generate([1, 2, 3], PARAMS)
        series = scrape(registry)
        found = {
            tuple(value for label, value in sorted(labels) if label in ("engine", "model_name")): value
            for (name, labels), value in series.items()
            if name == "aioinfer_output_tokens_total"
        }
        assert found == {("0", "toy"): 0, ("1", "other"): 6}
        await second.aclose()
        assert {dict(labels)["engine"] for _, labels in scrape(registry)} == {"0"}
    assert generate_latest(registry) == b""
    Gauge("aioinfer_steps", "The name is free again.", registry=registry)


async def test_registering_twice_is_an_error_that_says_what_to_do() -> None:
    registry, other = CollectorRegistry(), CollectorRegistry()
    engine, second = toy_engine(), toy_engine()
    engine.register(registry)
    with pytest.raises(ConfigError, match="in this registry already"):
        engine.register(registry, engine="1")
    with pytest.raises(ConfigError, match=r"engine '0' of the model 'toy' already: .*engine="):
        second.register(registry)
    with pytest.raises(ConfigError, match="vLLM's names"):
        second.register(registry, engine="1", vllm=True)
    with pytest.raises(ConfigError, match="engine must be a string"):
        second.register(other, engine=1)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model_name must be a string of 1 to 256"):
        second.register(other, model_name="x" * 257)
    with pytest.raises(ConfigError, match="not in this registry"):
        second.unregister(registry)
    Gauge("aioinfer_steps", "The application's own.", registry=other)
    with pytest.raises(ConfigError, match=r"metric of the same name.*aioinfer_steps"):
        second.register(other)
    engine.register(CollectorRegistry())
    engine.unregister(registry)
    second.register(registry, vllm=True)
    await engine.aclose()
    await second.aclose()
    assert generate_latest(registry) == b""


@rest(SECONDS)
async def test_a_registry_keeps_no_engine_that_was_dropped() -> None:
    registry = CollectorRegistry()
    toy_engine().register(registry)
    gc.collect()
    engine = toy_engine()
    engine.register(registry, vllm=True)
    async with engine:
        assert own(scrape(registry), "vllm:num_requests_running") == 0


def test_an_engine_whose_loop_was_closed_leaves_its_registry() -> None:
    registry = CollectorRegistry()
    engine = toy_engine(launch_mode="inline")
    engine.register(registry)
    asyncio.run(engine.start())
    assert engine.state is EngineState.RUNNING or engine.state is EngineState.CLOSED
    asyncio.run(engine.aclose())
    assert generate_latest(registry) == b""


@rest(SECONDS)
async def test_a_scrape_from_another_thread_disturbs_nothing() -> None:
    registry = CollectorRegistry()
    async with measured(registry) as engine:
        loop = asyncio.get_running_loop()
        streams = [engine.generate([index, 2, 3], PARAMS) for index in range(20)]
        scrapes = [loop.run_in_executor(None, scrape, registry) for _ in range(10)]
        results = [await stream for stream in streams]
        found = [await each for each in scrapes]
        assert all(len(result.token_ids) == 6 for result in results)
        assert all(own(series, "aioinfer_kv_capacity_pages") == 64 for series in found)


async def test_the_applications_own_registry_is_left_alone() -> None:
    before = set(generate_latest(REGISTRY).decode().splitlines())
    async with measured(CollectorRegistry()):
        after = generate_latest(REGISTRY).decode()
    assert "aioinfer" not in after
    assert before


@rest(SECONDS)
def test_nothing_is_imported_before_it_is_wanted() -> None:
    code = (
        "import sys, aioinfer, aioinfer.engine, aioinfer.server\n"
        "engine = aioinfer.Engine(aioinfer.EngineConfig())\n"
        "aioinfer.server.create_app(engine)\n"
        "assert not {'prometheus_client', 'opentelemetry', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_part_of_a_forward_is_a_label() -> None:
    entry = next(entry for entry in OWN if entry.name == "aioinfer_forward_seconds")
    assert isinstance(entry, Value)
    snapshot: Any = SimpleNamespace(stats=SimpleNamespace(forward_seconds={"attention": 1.5}))
    assert entry.read(snapshot) == {"attention": 1.5}
