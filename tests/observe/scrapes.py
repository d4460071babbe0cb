"""What a Prometheus server sees of an engine: scrapes in both formats, and promtool's checks of names."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.execution.launcher import InlineLauncher, ThreadLauncher
from tests.toys import ToyDevice, ToyTokenizer

__all__ = ["Series", "lint", "read_openmetrics", "read_text", "scrape", "toy_engine", "values"]

#: (name of the sample, its labels) -> value
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

#: of promtool: units that are no base units, and abbreviations
_UNITS = (
    "milliseconds", "microseconds", "nanoseconds", "minutes", "hours", "days", "weeks", "kilobytes",
    "megabytes", "bits", "percent",
    "s", "ms", "us", "ns", "sec", "b", "kb", "mb", "gb", "tb", "pb", "m", "h", "d",
)  # fmt: skip


def toy_engine(*, fault: Any = None, **settings: Any) -> Engine:
    """An engine on the toy device."""
    config = EngineConfig(**{"model": "toy", "page_size": 4, "num_pages": 64, **settings})
    device = ToyDevice(
        num_pages=config.num_pages or 0, page_size=config.page_size, num_slots=config.num_slots, fault=fault
    )
    launcher = ThreadLauncher if config.launch_mode == "thread" else InlineLauncher
    return Engine(config, launcher=lambda _: launcher(device), tokenizer=lambda _: ToyTokenizer())


def scrape(registry: CollectorRegistry) -> Series:
    return values(read_text(generate_latest(registry).decode()))


def read_text(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def read_openmetrics(text: str) -> list[Metric]:
    parse: Any = openmetrics.text_string_to_metric_families
    return list(parse(text))


def values(families: Iterable[Metric]) -> Series:
    """Every sample; each is there once."""
    found: Series = {}
    for sample in (sample for family in families for sample in family.samples):
        key = sample.name, frozenset(sample.labels.items())
        assert key not in found, f"{key} is there twice"
        found[key] = sample.value
    return found


def lint(family: Metric) -> list[str]:
    """What ``promtool check metrics`` would complain about."""
    name = family.name
    wrong = []
    if not family.documentation:
        wrong.append("has no help text")
    if ":" in name:
        wrong.append("has a colon, which is for rules")
    elif not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        wrong.append("is not in snake case")
    words = name.split("_")
    wrong += [f"has the unit {unit}" for unit in _UNITS if unit in words]
    wrong += [
        f"has its type in its name: {kind}" for kind in ("gauge", "counter", "histogram") if kind in words
    ]
    if family.type != "counter" and name.endswith("_total"):
        wrong.append("ends in _total and is no counter")
    if family.type not in ("histogram", "summary") and name.endswith(("_count", "_sum", "_bucket")):
        wrong.append("has the suffix of a histogram")
    if family.type == "unknown":
        wrong.append("has no type")
    for sample in family.samples:
        if family.type == "counter" and not sample.name.endswith("_total"):
            wrong.append(f"counts in {sample.name}")
        if "le" in sample.labels and family.type != "histogram":
            wrong.append("has the label le")
        wrong += [f"has the label {label}" for label in sample.labels if not re.fullmatch("[a-z_]+", label)]
    return sorted(set(wrong))
