"""Reports of simulations: objectives, figures, tables and drawings."""

from __future__ import annotations

import builtins
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aioinfer.errors import ConfigError
from aioinfer.twin import drawings
from aioinfer.twin.outcome import Outcome
from aioinfer.twin.report import Slo, as_json, figures, table
from tests.tiers import SECONDS, rest


def outcome() -> Outcome:
    """100 requests that arrive one a second: TTFT of 0.01 to 1 s, a second in the queue less than that, 11
    tokens with gaps of 20 ms. Then one that was refused and two that failed, at the end, 200 s."""
    made = Outcome(seconds=200.0, busy=80.0, served=400.0, retractions=3)
    for number in range(100):
        first = number + (number + 1) / 100
        for column, value in {
            "arrived": float(number), "admitted": first - 0.005, "first": first, "ended": first + 0.2,
            "prompt_tokens": 100, "cached_tokens": 25, "output_tokens": 11, "refused": 0.0,
        }.items():  # fmt: skip
            getattr(made, column).append(value)
    made.itl.add(np.full(1000, 0.02))
    for error, retry in (("Rejected", 2.5), ("TimedOut", 0.0), ("EngineFailed", 0.0)):
        made.errors[error] += 1
        for column, lost in {
            "arrived": 200.0, "admitted": math.nan, "first": math.nan, "ended": 200.0,
            "prompt_tokens": 100, "cached_tokens": 0, "output_tokens": 0, "refused": retry,
        }.items():  # fmt: skip
            getattr(made, column).append(lost)
    made.samples += [(0.0, 2, 4, 0.25), (1.0, 0, 4, 0.75)]
    return made


# -- objectives ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ttft=1s,itl=50ms,e2e=30s", Slo(1.0, 0.05, 30.0)),
        ("e2e = 1.5min", Slo(e2e=90.0)),
        (" itl=.5ms , ttft=2h", Slo(ttft=7200.0, itl=0.0005)),
    ],
)
def test_objectives_are_read_with_their_units(text: str, expected: Slo) -> None:
    assert Slo.parse(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ttft=1", r"^ttft of slo must be a number with a unit \(ms, s, min, h\), got '1'"),
        ("itl=-5ms", "^itl of slo .*'-5ms'"),
        ("ttft=1s,itl=5us", "^itl of slo .*'5us'"),
        ("tftt=1s", "^slo has parts ttft, itl, e2e.*'tftt=1s'"),
        ("", "^slo has parts.*''"),
        ("e2e=1s,e2e=2s", "^slo has parts ttft, itl, e2e, each once.*'e2e=2s'"),
    ],
)
def test_wrong_objectives_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Slo.parse(text)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(), 100),
        (Slo(ttft=0.505), 50),
        (Slo(itl=0.0201), 100),
        (Slo(itl=0.0199), 0),
        (Slo(e2e=0.455), 25),
        (Slo(ttft=0.505, e2e=0.455), 25),
    ],
)
def test_goodput_counts_requests_that_meet_all_objectives_and_none_that_failed(slo: Slo, good: int) -> None:
    found = figures(outcome(), slo)
    assert found.met == good / 103
    assert found.goodput == good / 200


def test_one_token_has_no_gaps_to_judge() -> None:
    made = Outcome(seconds=1.0)
    for column in ("arrived", "admitted", "first", "ended", "refused"):
        getattr(made, column).append(0.0)
    for column in ("prompt_tokens", "cached_tokens", "output_tokens"):
        getattr(made, column).append(1)
    assert figures(made, Slo(itl=1e-9)).met == 1


# -- figures -------------------------------------------------------------------------------------------


def test_figures_of_an_outcome() -> None:
    found = figures(outcome(), price=3.6)
    assert (found.requests, found.refused) == (103, 1)
    assert found.failed == {"EngineFailed": 1, "TimedOut": 1}
    assert (found.output_rate, found.prompt_rate) == (5.5, 50.0)
    assert (found.hit_rate, found.pages, found.busy) == (0.25, 0.5, 0.2)
    assert (found.retractions, found.seconds, found.served) == (3, 200.0, 400.0)
    assert found.cost == pytest.approx(0.4 / 1100 * 1e6)
    close(found.ttft, {"p50": 0.505, "p95": 0.9505, "p99": 0.9901})
    close(found.queue, {"p50": 0.5, "p95": 0.9455, "p99": 0.9851})
    close(found.e2e, {"p50": 0.705, "p95": 1.1505, "p99": 1.1901})
    close(found.itl, dict.fromkeys(("p50", "p95", "p99"), 0.02), 2e-3)


def close(found: Mapping[str, float], expected: dict[str, float], error: float = 1e-9) -> None:
    assert found == pytest.approx(expected, rel=error)


def test_nothing_at_all_has_figures() -> None:
    found = figures(Outcome(), Slo(ttft=1.0), price=1.0)
    assert (found.requests, found.met, found.cost, found.ttft) == (0, None, None, {})
    assert "goodput" not in table([("", found)])
    assert json.loads(as_json([("", found)]))["variants"][0]["busy"] is None


# -- tables --------------------------------------------------------------------------------------------


def test_a_table_has_a_column_for_each_variant_and_no_rows_without_values() -> None:
    good, bad = outcome(), outcome()
    bad.errors["OutOfMemory"] = 7
    bad.retractions = 0
    rows = [("routing=hash replicas=2", figures(good)), ("routing=prefix replicas=2", figures(bad, Slo(0.0)))]
    lines = table(rows).splitlines()
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    assert lines[0].split() == ["routing=hash", "routing=prefix"]
    assert lines[1].split() == ["replicas=2", "replicas=2"]
    cells = {line[:32].strip(): line[32:].split() for line in lines[2:]}
    assert cells["requests"] == ["103", "103"]
    assert cells["failed: OutOfMemory"] == ["-", "7"]
    assert cells["meet the SLO, %"] == ["97.09", "0"]
    assert cells["TTFT p50, ms"] == ["505.0", "505.0"]
    assert cells["E2E p99, ms"] == ["1190", "1190"]
    assert cells["retractions"] == ["3", "0"]
    assert not any("cost" in name for name in cells)


def test_a_table_of_one_run_has_no_heading() -> None:
    assert table([("", figures(outcome()))]).startswith("requests")


def test_json_has_the_figures_and_facts() -> None:
    found = json.loads(as_json([("rate=2", figures(outcome()))], seed=4))
    assert found["seed"] == 4
    (variant,) = found["variants"]
    assert variant["variant"] == "rate=2"
    assert variant["ttft"]["p50"] == pytest.approx(0.505)
    assert variant["failed"] == {"EngineFailed": 1, "TimedOut": 1}


# -- drawings ------------------------------------------------------------------------------------------


@rest(SECONDS)
@pytest.mark.parametrize(
    "labels", [("",), ("rate=1", "rate=2"), ("routing=hash rate=1", "routing=p2c rate=2")]
)
def test_drawings_are_pictures(labels: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    outcomes = [(label, outcome()) for label in labels[1:]] + [(labels[0], Outcome())]
    drawings.draw(outcomes, [(label, figures(each)) for label, each in outcomes], tmp_path / "new" / "plots")
    names = {"distributions.png"} | {f"course-{number + 1}.png" for number in range(len(labels))}
    files = {file.name: file.read_bytes() for file in (tmp_path / "new" / "plots").iterdir()}
    assert files.keys() == names | ({"percentiles.png"} if len(labels) > 1 else set())
    for name, content in files.items():
        assert content.startswith(b"\x89PNG\r\n\x1a\n"), name
        width, height = (int.from_bytes(content[at : at + 4], "big") for at in (16, 20))
        assert 400 < width < 2000, name
        assert 300 < height < 2000, name


def test_drawings_without_matplotlib_name_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    imported = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"pip install 'aioinfer\[drawings\]'"):
        drawings.check()
