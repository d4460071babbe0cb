"""Deadlines met under slack and under other policies: exact figures of a cost model in virtual time."""

from __future__ import annotations

import argparse

import pytest

from bench import deadlines
from bench.report import Report
from tests.tiers import SECONDS, rest


@rest(SECONDS)
@pytest.mark.parametrize(("load", "margin"), [(1.0, 1.0), (3.0, 3.0)])
def test_slack_meets_more_deadlines_than_others(load: float, margin: float) -> None:
    parser = argparse.ArgumentParser()
    deadlines.add_arguments(parser)
    report = Report()
    deadlines.run(parser.parse_args(["--clocks", "virtual", "--loads", str(load)]), report)
    rows = {row["policy"]: row for row in report.rows}
    others = max(rows[name]["met"] for name in ("fcfs", "lpm", "priority", "edf"))
    assert rows["slack, all"]["met"] >= margin * others - 0.02
    assert rows["slack"]["met"] >= margin * others
    # Who is refused could not have made it, by and large, and who is not makes it.
    assert rows["slack"]["late"] < 0.5 * rows["slack, all"]["late"]
    assert rows["slack"]["late"] + rows["slack"]["refused"] <= 1.15 * rows["slack, all"]["late"]
    assert rows["slack"]["estimate_off"] < 0.5
    assert rows["slack"]["free_s_mean"] < rows["priority"]["free_s_mean"]
