"""With the times of a real run, the scheduler makes its steps again; and costs come from real steps."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from aioinfer.cli.main import main
from aioinfer.config import EngineConfig
from aioinfer.scheduling.costs import Costs
from bench import twin
from bench.report import Report
from tests.tiers import LONG, PROGRAM, rest
from tests.twin.worlds import COSTS, requests

CONFIG = EngineConfig(model="tiny-chat", speculation="off", threads=1)


@rest(LONG)
def test_recorded_times_bring_the_recorded_steps(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    twin.replay(CONFIG, COSTS, [*requests(40, 20, 20, 5)], report)
    (row,) = report.rows
    assert row["holds"] == "True", row
    assert row["real"] == row["twin"] > 40
    assert "replay" in capsys.readouterr().out


@rest(LONG)
def test_a_calibration_is_a_file_that_an_engine_and_a_simulation_take(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    assert main(["calibrate", "tiny-chat", "--seconds", "3", "--threads", "1", "-o", str(path)]) == 0
    told = capsys.readouterr().out
    assert "tiny-chat" in told
    assert f"written to {path}" in told
    costs = Costs.read(path)
    assert costs.fit is not None
    assert costs.fit.steps > 50
    assert costs.engine["max_model_len"] == 1024
    assert costs.step.base > 0
    assert costs.host.plan > (0.0, -1.0)
    assert min(costs.noise) > 0
    assert main(["simulate", "--costs", str(path), "--requests", "20", "--workload", "chat"]) == 0
    assert "goodput" in capsys.readouterr().out
    assert (
        main(["generate", "What is 17 + 25?", "--costs", str(path), "--max-tokens", "3", "--threads", "1"])
        == 0
    )


@rest(PROGRAM)
def test_two_processes_print_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    COSTS.write(path)
    command = [sys.executable, "-m", "aioinfer", "simulate", "--costs", str(path), "--workload", "chat"]
    command += ["--requests", "150", "--replicas", "3", "--rate", "4", "--kill", "1@20s", "--seed", "7"]
    printed = [
        subprocess.run(
            command, capture_output=True, check=True, env={"PYTHONHASHSEED": seed}, timeout=300
        ).stdout
        for seed in ("1", "2")
    ]
    assert printed[0] == printed[1]
    assert b"goodput" in printed[0]


def test_a_file_of_costs_that_is_missing_is_told_at_the_start(tmp_path: Path) -> None:
    from aioinfer.engine import Engine
    from aioinfer.errors import ConfigError

    engine = Engine(EngineConfig(model="tiny-chat", costs=str(tmp_path / "none.json"), threads=1))
    with pytest.raises(ConfigError, match=r"costs: .*none\.json: No such file"):
        asyncio.run(engine.start())
