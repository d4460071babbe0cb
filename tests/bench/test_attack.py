"""The benches for hostile requests and long loads, in small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.attack.attacks import ATTACKS
from bench.soak.clients import KINDS
from bench.soak.command import slope
from tests.tiers import PROGRAM, nightly

ROOT = Path(__file__).parents[2]


def run(*arguments: str, file: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench", *arguments, "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    line: dict[str, Any] = json.loads(file.read_text())
    return line


@nightly(PROGRAM)
def test_attacks_end_with_an_answer_and_leave_nothing(tmp_path: Path) -> None:
    """What once brought a 5xx, a traceback or a leak; how long canaries wait is not judged here."""
    names = ["nested", "not-http", "surrogates", "leavers"]
    line = run("attack", "--alone", "0.5", "--only", *names, file=tmp_path / "a")
    rows = {row["attack"]: row for row in line["rows"]}
    assert list(rows) == ["none", *names]
    for name in names:
        assert rows[name]["answers"], name
        # Fewer than before: a connection of the canaries was about to end when they were counted.
        assert max(rows[name]["fds"], rows[name]["tasks"]) <= 0, rows[name]


@nightly(PROGRAM)
def test_a_soak_brings_the_same_answers_throughout(tmp_path: Path) -> None:
    line = run("soak", "--seconds", "5", "--clients", "24", file=tmp_path / "s")
    assert line["facts"]["wrong"] == 0
    assert set(line["facts"]["requests"]) == set(KINDS)


def test_every_attack_says_what_it_is() -> None:
    assert all(attack.purpose and attack.clients > 0 for attack in ATTACKS.values())
    assert len(ATTACKS) >= 16


def test_a_slope_is_that_of_the_line_through_the_points() -> None:
    assert slope([[0, 5], [10, 10], [20, 15]]) == pytest.approx(0.5)
    assert slope([[1, 1]]) == 0
