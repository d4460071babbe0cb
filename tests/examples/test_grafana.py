"""The board for Grafana: every query names metrics and labels that a scrape has, and panels lie apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from aioinfer import SamplingParams
from tests.observe.scrapes import Series, read_text, toy_engine, values

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "examples/grafana/aioinfer.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
#: words of PromQL in the queries
_FUNCTIONS = {"histogram_quantile", "sum", "avg", "max", "rate", "by"}
_VARIABLES = {"model_name", "engine"}


async def scraped() -> Series:
    registry = CollectorRegistry()
    engine = toy_engine()
    engine.register(registry)
    async with engine:
        await engine.generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
        return values(read_text(generate_latest(registry).decode()))


def wrong(query: str, series: Series) -> list[str]:
    """Names in a query that no sample has."""
    labels_of: dict[str, set[str]] = {}
    for name, labels in series:
        labels_of.setdefault(name, set()).update(label for label, _ in labels)
    selectors = re.findall(r"(\w+)\{([^}]*)\}", query)
    metrics = {name for name, _ in selectors}
    found = [name for name in metrics if name not in labels_of]
    for name, matchers in selectors:
        used = set(re.findall(r"(\w+)=", matchers))
        assert used == _VARIABLES, f"{name} is not of the chosen engines"
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in group.split(", ")}
    found += [label for label in grouped if not any(label in labels_of.get(name, ()) for name in metrics)]
    rest = re.sub(r'\{[^}]*\}|\[[^]]*\]|by \([^)]*\)|"[^"]*"', "", query)
    words = set(re.findall(r"[a-z_]\w*", rest)) - metrics - _FUNCTIONS
    return found + sorted(words)


async def test_every_query_names_what_a_scrape_has() -> None:
    series = await scraped()
    assert len(QUERIES) > 40
    assert not {query: names for query in QUERIES if (names := wrong(query, series))}


@pytest.mark.parametrize("query", QUERIES)
def test_counters_are_rated_and_gauges_are_not(query: str) -> None:
    assert query.count("(") == query.count(")")
    for function, name in re.findall(r"(\w+)\((aioinfer_\w+)\{", query):
        counting = name.endswith(("_total", "_bucket", "_count")) or name == "aioinfer_step_tokens_sum"
        assert (function == "rate") == counting, name


def test_headline_metrics_have_panels() -> None:
    text = " ".join(QUERIES)
    for name in (
        "time_to_first_token_seconds", "inter_token_latency_seconds", "request_queue_seconds",
        "request_seconds", "output_tokens_total", "requests_running", "requests_waiting", "kv_pages",
        "prefix_cache_hit_tokens_total", "event_loop_lag_seconds", "device_gap_seconds_total", "aborts_total",
        "stream_backlog_tokens",
    ):  # fmt: skip
        assert f"aioinfer_{name}" in text
