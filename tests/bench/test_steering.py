"""The steering bench: checkouts take turns, figures follow their definitions, and every part runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.command import main
from bench.elsewhere import checkout, in_turns, spread
from bench.report import Report
from bench.steering.beside import sample
from bench.steering.setting import tell
from tests.tiers import PROGRAM, nightly

ROOT = Path(__file__).parents[2]


def test_checkouts_take_turns_and_each_begins() -> None:
    asked: list[str] = []

    def figures(place: Path) -> dict[str, float]:
        asked.append(place.name)
        return {"x": len(asked)}

    found = in_turns({"here": Path("a"), "before": Path("b")}, 2, figures)
    assert asked == ["a", "b", "b", "a"]
    assert found == {"x": {"here": [1, 4], "before": [2, 3]}}
    assert spread([3.0, 1.0, 2.0]) == {"ratio": 2.0, "least": 1.0, "most": 3.0}


def test_a_checkout_can_be_a_directory(tmp_path: Path) -> None:
    with checkout(str(tmp_path)) as place:
        assert place == tmp_path.resolve()


def test_rates_are_those_while_all_rows_generate() -> None:
    found = sample([[0.0, 1.0, 2.0, 3.0], [0.5, 1.5, 2.5, 3.5]], [0.25, 0.75, 2.75, 9.0])
    assert found.rate == pytest.approx(5 / 2.5)
    assert found.gaps == [1.0, 1.0, 1.0, 1.0]
    assert found.own == [2.0]


def test_a_figure_stands_beside_its_bound() -> None:
    report = Report()
    tell(report, "a", 3.0, most=3)
    tell(report, "b", 3.1, most=3)
    tell(report, "c", 2.9, least=3)
    assert [(row["asked"], row["met"]) for row in report.rows] == [
        ("<= 3", "yes"),
        ("<= 3", "NO"),
        (">= 3", "NO"),
    ]


@nightly(PROGRAM)
def test_every_part_has_its_rows(tmp_path: Path) -> None:
    file = tmp_path / "line.json"
    options = ["--quick", "--against", str(ROOT), "--place", str(tmp_path), "--json", str(file)]
    assert main(["steering", *options]) == 0
    found = {part: section["rows"] for part, section in json.loads(file.read_text())["sections"].items()}
    numbers = {"off": 8, "processors": 10, "best_of": 4, "fork": 6, "beam": 1}
    assert {part: len(rows) for part, rows in found.items()} == numbers
    one, many = found["best_of"][:2]
    assert (one["prefill_tokens"], one["different"], many["different"]) == (64, 1, 16)
    assert one["peak_pages"] == 5 < many["peak_pages"]
