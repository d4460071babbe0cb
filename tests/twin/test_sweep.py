"""Sweeps: variants of a simulation, and other values from text."""

from __future__ import annotations

from pathlib import Path

import pytest

from aioinfer.config import EngineConfig
from aioinfer.errors import ConfigError
from aioinfer.scheduling.costs import Costs, StepCosts
from aioinfer.twin.running import Event, Setup
from aioinfer.twin.sweep import events, variants

SETUP = Setup(
    costs=Costs(step=StepCosts(base=0.01, row=0.0, context=0.0, attention=0.0, token=(0.0,))),
    config=EngineConfig(model="tiny-chat", policy="lpm"),
    replicas=3,
)


def test_nothing_varied_is_one_run_without_a_label() -> None:
    assert variants(SETUP, 1.5, []) == [("", SETUP, 1.5)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2..5", [2, 3, 4, 5]),
        ("2..8..3", [2, 5, 8]),
        ("1, 4..5 ,9", [1, 4, 5, 9]),
        ("7", [7]),
        ("3..3", [3]),
    ],
)
def test_values_are_lists_and_ranges_that_include_their_ends(text: str, expected: list[int]) -> None:
    found = variants(SETUP, 1.0, [f"replicas={text}"])
    assert [each.setup.replicas for each in found] == expected
    assert [each.label for each in found] == [f"replicas={number}" for number in expected]


def test_several_names_are_a_product_and_leave_the_rest_as_it_is() -> None:
    found = variants(SETUP, 1.0, ["routing=hash,p2c", "rate=0.5,2", "max-running-requests=16"])
    assert [each.label for each in found] == [
        f"routing={routing} rate={rate} max_running_requests=16"
        for routing in ("hash", "p2c")
        for rate in ("0.5", "2")
    ]
    assert [(each.setup.routing, each.rate) for each in found] == [
        ("hash", 0.5), ("hash", 2.0), ("p2c", 0.5), ("p2c", 2.0)
    ]  # fmt: skip
    for each in found:
        assert each.setup.replicas == 3
        assert each.setup.config.max_running_requests == 16
        assert each.setup.config.policy == "lpm"


def test_a_seed_is_that_of_the_simulation() -> None:
    assert [each.setup.seed for each in variants(SETUP, 1.0, ["seed=1..3"])] == [1, 2, 3]


def test_costs_are_read_for_each_variant(tmp_path: Path) -> None:
    other = Costs(step=StepCosts(base=0.5, row=0.0, context=0.0, attention=0.0, token=(0.0,)))
    other.write(tmp_path / "other.json")
    (found,) = variants(SETUP, 1.0, [f"costs={tmp_path / 'other.json'}"])
    assert found.setup.costs == other


@pytest.mark.parametrize(
    ("what_if", "message"),
    [
        (["replica=2"], "what-if varies replicas, routing, rate and settings.*'replica=2'"),
        (["2..8"], "what-if varies.*'2..8'"),
        (["replicas=2", "replicas=3"], "what-if varies replicas twice"),
        (["replicas="], "what-if replicas has an empty value or range: ''"),
        (["replicas=2,,3"], "what-if replicas has an empty value or range: '2,,3'"),
        (["replicas=8..2"], "what-if replicas has an empty value or range: '8..2'"),
        (
            ["replicas=2..8..0"],
            "what-if replicas=2..8..0: replicas must be a whole number above 0.*'2..8..0'",
        ),
        (["replicas=1..999999"], "what-if has 999999 variants: at most 1000 are run"),
        (["replicas=2..x"], "what-if replicas=2..x: replicas must be a whole number above 0.*'2..x'"),
        (["replicas=1,0"], "what-if replicas=0: replicas must be"),
        (["rate=1,nan"], "what-if rate=nan: rate must be a number above 0.*'nan'"),
        (["routing=prefix,best"], "what-if routing=best: routing must be one of round_robin.*'best'"),
        (["max_running_requests=x"], "what-if max_running_requests=x: max_running_requests must be a number"),
        (["chunk_size=0"], "what-if chunk_size=0: chunk_size must be"),
        (["costs=/nowhere"], "what-if costs=/nowhere: costs: /nowhere"),
        (["replicas=1..100", "seed=1..100"], "what-if has 10000 variants: at most 1000"),
    ],
)
def test_errors_name_the_bad_part(what_if: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        variants(SETUP, 1.0, what_if)


def test_events_are_in_the_order_of_their_times() -> None:
    found = events(["2@120s", "0@1.5min"], ["1@500ms"], ["1h", "100s"])
    assert found == (
        Event(0.5, "drain", 1), Event(90.0, "kill", 0), Event(100.0, "join"), Event(120.0, "kill", 2),
        Event(3600.0, "join"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kill", "join", "message"),
    [
        ("120s", "1s", "kill must be REPLICA@TIME, such as 2@120s; got '120s'"),
        ("-1@2s", "1s", "kill must be REPLICA@TIME.*'-1@2s'"),
        ("1@2", "1s", "the time of kill must be a number with a unit.*'2'"),
        ("1@2s", "1@2s", "join must be a number with a unit.*'1@2s'"),
    ],
)
def test_wrong_events_are_named(kill: str, join: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        events([kill], [], [join])
