"""``aioinfer simulate``: predictions in virtual time, the same for the same arguments."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from aioinfer.cli import simulate as command
from aioinfer.cli.main import main
from aioinfer.scheduling.costs import Costs, Fit, StepCosts
from aioinfer.twin import running
from aioinfer.twin.virtual_trace import VirtualTrace
from tests.tiers import SECONDS, rest

STEP = StepCosts(base=5e-3, row=1e-4, context=1e-7, attention=1e-9, token=(5e-5,), prefill=1e-3)
FIT = Fit(steps=500, r2=0.99, median_error=0.02, p90_error=0.1, ranges={"rows": (1, 64)})


@pytest.fixture
def costs(tmp_path: Path) -> str:
    """A file of costs that were measured."""
    path = tmp_path / "costs.json"
    Costs(step=STEP, fit=FIT, fingerprint={"model": "a-model", "processor": "a-gpu"}).write(path)
    return str(path)


def run(costs: str, *arguments: str) -> int:
    return main(["simulate", "--costs", costs, *arguments])


def cells(shown: str) -> dict[str, list[str]]:
    """The table of an output: cells by the names of rows."""
    lines = [re.split(r"  +", line.strip()) for line in shown.partition("\n\n")[2].splitlines()]
    return {name: values for name, *values in lines}


@rest(SECONDS)
def test_reruns_print_the_same_and_another_seed_something_else(
    costs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = []
    for seed in ("7", "7", "8"):
        assert run(costs, "--requests", "5", "--slo", "ttft=1ms", "--seed", seed) == 0
        output = capsys.readouterr()
        assert re.fullmatch(r"simulation: \d+ s in [\d.]+ s\n", output.err)
        shown.append(output.out)
    assert shown[0] == shown[1] != shown[2]
    assert re.match(r"load   chat\ncosts  a-model, a-gpu \(500 .*\)\nseed   7\n\nrequests +5\n", shown[0])
    assert cells(shown[0])["meet the SLO, %"] == ["0"]


@rest(SECONDS)
def test_what_if_has_a_column_for_each_variant_and_files_have_the_same(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, plots = tmp_path / "figures.json", tmp_path / "plots"
    given = ["--what-if", "replicas=1,2", "--what-if", "rate=4", "--price", "2", "--json", str(file)]
    pytest.importorskip("matplotlib")
    assert run(costs, "--requests", "6", *given, "--plots", str(plots)) == 0
    found = cells(capsys.readouterr().out)
    assert found["requests"] == ["6", "6"]
    assert len(found["cost per million output tokens"]) == 2
    variants = json.loads(file.read_text())["variants"]
    assert [each["variant"] for each in variants] == ["replicas=1 rate=4", "replicas=2 rate=4"]
    assert 2 * variants[0]["cost"] == pytest.approx(variants[1]["cost"], rel=0.1)
    assert len([*plots.glob("*.png")]) == 4


def test_a_trace_is_played_at_a_rate_and_up_to_a_time(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "azure.csv"
    rows = (f"2023-11-16 18:15:{second:02d}.0,100,20\n" for second in range(60))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(rows))
    given = ["--trace", str(trace), "--rate", "2", "--duration", "10s", "--json", str(tmp_path / "x.json")]
    assert run(costs, *given) == 0
    shown = capsys.readouterr().out
    assert json.loads((tmp_path / "x.json").read_text())["load"] == str(trace)
    assert shown.startswith(f"load   {trace}\n")
    assert cells(shown)["requests"] == ["20"]


def test_extrapolated_costs_are_said_to_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "costs.json"
    Costs(step=STEP, fingerprint={"model": "a-model"}).write(path)
    assert run(str(path), "--requests", "1") == 0
    assert "\nnote   figures are extrapolated" in capsys.readouterr().out


def test_flags_reach_the_simulation(costs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setups: list[running.Setup] = []
    real = running.simulate

    def simulate(load: Any, setup: running.Setup, **options: Any) -> Any:
        setups.append(setup)
        return real(load, replace(setup, events=()), **options)

    monkeypatch.setattr(running, "simulate", simulate)
    given = "--exact --roles both,both --routing hash --kill 1@2min --chunk-size 64"
    assert run(costs, "--requests", "2", *given.split(), "--drain", "0@60s", "--join", "1s") == 0
    (setup,) = setups
    assert (setup.replicas, setup.roles, setup.routing, setup.exact) == (2, ("both", "both"), "hash", True)
    assert setup.events == (
        running.Event(1.0, "join"),
        running.Event(60.0, "drain", 0),
        running.Event(120.0, "kill", 1),
    )
    assert setup.config.chunk_size == 64


def test_perfetto_gets_the_steps_and_requests_of_the_run(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    assert run(costs, "--requests", "3", "--perfetto", str(file)) == 0
    events = json.loads(file.read_text())["traceEvents"]
    steps = [event for event in events if event["ph"] == "X"]
    assert sum(event["ph"] == "b" for event in events) == 3
    assert f"\n{len(steps) + 3} events in {file}; open" in capsys.readouterr().out
    assert all(event["dur"] >= 1e6 * STEP.base - 1 and event["args"]["tokens"] for event in steps)


def test_a_virtual_trace_is_bounded_and_says_what_it_left_out(tmp_path: Path) -> None:
    trace = VirtualTrace(most=3)
    for number in range(4):
        trace.step(number % 2, "forward", number, number, number + 0.5, 8)
        trace.request(str(number), number, number + 1, 5)
    trace.write(tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    assert (trace.kept, trace.left_out) == (3, 5)
    assert found["otherData"] == {"left out": 5}
    names = [event["args"]["name"] for event in found["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["replica 0", "replica 1"]
    assert [event["ts"] for event in found["traceEvents"] if event["ph"] == "X"] == [0.0, 1e6]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workload", "nonsense"], "--workload must be one of chat, "),
        (["--requests", "0"], "requests must be a whole number above 0"),
        (["--duration", "5"], "--duration must be a number with a unit"),
        (["--rate", "-1"], "rate must be a number above 0"),
        (["--price", "nan"], "price must be a number above 0"),
        (["--routing", "best"], "routing must be one of"),
        (["--roles", "prefill"], "roles: at least one replica"),
        (["--roles", "both,both", "--replicas", "3"], "roles: 2 for 3 replicas"),
        (["--kill", "1@5s"], "kill: there is no replica 1 at 5 s; the first is 0"),
        (["--kill", "1@5s", "--join", "6s"], "kill: there is no replica 1 at 5 s"),
        (["--drain", "0@1s", "--kill", "0@5s"], "kill: there is no replica 0 at 5 s"),
        (["--kill", "2@5s", "--what-if", "replicas=2..4"], "kill: there is no replica 2 at 5 s"),
        (["--json", "/no/such/directory/x"], "/no/such/directory/x: no file in a directory"),
        (["--perfetto", "/"], "/: no file in a directory"),
        (["--slo", "ttft"], "ttft of slo must be a number with a unit"),
        (["--what-if", "nothing=1"], "what-if varies replicas, routing, rate"),
        (["--what-if", "rate=1,2", "--perfetto", "x"], "--perfetto writes a single run"),
        (["--trace", "/nowhere"], "/nowhere: No such file"),
        (["--costs", "/nowhere"], "costs: /nowhere: No such file"),
    ],
)
def test_wrong_arguments_are_one_line_before_anything_runs(
    costs: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(costs, *arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"aioinfer: {message}")
    assert shown.err.count("\n") == 1


def test_costs_are_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate"]) == 2
    assert "needs --costs FILE" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_one_line_after_the_figures(
    costs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    assert run(costs, "--requests", "1", "--plots", str(tmp_path / "file")) == 1
    shown = capsys.readouterr()
    assert "requests  " in shown.out
    assert str(tmp_path / "file") in shown.err.splitlines()[-1]


@pytest.mark.parametrize("flag", ["--threads", "--kv-memory-gib", "--speculation", "--refine-costs"])
def test_what_is_not_simulated_is_no_flag(costs: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(costs, flag, "1")
    assert f"unrecognized arguments: {flag}" in capsys.readouterr().err


def test_a_signal_ends_the_simulation(
    costs: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Bar:
        """Interrupts the command when the simulation has begun."""

        sent = False

        def __call__(self, *progress: Any) -> None:
            if not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(command, "Progress", Bar)
    before = threading.active_count()
    assert run(costs, "--requests", "100000000") == 128 + signal.SIGINT
    assert threading.active_count() == before, "its thread has ended"
    assert capsys.readouterr() == ("", "aioinfer: interrupted by SIGINT\n")


def test_sizes_beyond_those_that_were_measured_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "measured.json"
    fit = Fit(100, 0.99, 0.03, 0.1, {"rows": (0.0, 64.0), "context": (0.0, 10.0)})
    Costs(step=STEP, fit=fit).write(path)
    assert run(str(path), "--requests", "5") == 0
    told = "note   figures are extrapolated: steps have more context than were measured"
    assert told in capsys.readouterr().out
