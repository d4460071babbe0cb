"""The CPU bench takes turns, goes on without engines that fail, and computes figures as they are defined."""

from __future__ import annotations

import argparse
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

import bench.cpu.contest
import bench.cpu.serving
from bench.client import summarise
from bench.command import execute, main, parse
from bench.cpu.cells import Cell, agreement, figures, prompts, ratio, schedule
from bench.cpu.command import add_arguments, complete, own_settings
from bench.cpu.contest import Contest, Contestant, Limits
from bench.cpu.serving import Server, contest, free_port, measure, pooled
from bench.cpu.tables import summary, tell
from bench.load import make_load
from bench.peers.registry import PEERS, Precision
from bench.report import Report
from tests.bench.fake_peer import SETTINGS, command_of
from tests.server.conftest import Serving, serving
from tests.tiers import PROGRAM, SECONDS, nightly, rest

__all__ = ["serving"]

ROOT = Path(__file__).parents[2]
CELLS = [Cell(1, 5, 8), Cell(2, 5, 8), Cell(1, 30, 1)]


# -- turns ---------------------------------------------------------------------------------------------


def contestant(mode: str, tmp_path: Path) -> Contestant:
    return Contestant(mode, command_of(mode), ROOT, tmp_path / f"{mode}.log", dict(SETTINGS))


@rest(SECONDS)
@pytest.mark.parametrize("together", [True, False])
def test_a_contest_goes_on_without_those_that_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], together: bool
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    modes = (
        ["well", "differs", "tells", "raises", "dies", "refuses to load"] if together else ["well", "dies"]
    )
    engines = [contestant(mode, tmp_path) for mode in modes]
    engines.append(Contestant("missing", ["/no/such/python"], ROOT, tmp_path / "none.log", dict(SETTINGS)))
    contest = Contest(engines, CELLS, 50, Limits(load=60, run=60))
    assert contest.run(2, together) is together
    found = {engine.name: engine for engine in engines}
    for name in {"well", "tells"} & set(found):
        assert {cell: len(rows) for cell, rows in found[name].samples.items()} == {
            "c=1": 2, "c=2": 2, "prefill 1x30": 2
        }  # fmt: skip
        assert all(row["agreement"]["prefix"] == 1 for rows in found[name].samples.values() for row in rows)
        assert found[name].peak.resident > 5
        assert found[name].failed is None
    assert len(found["well"].load_seconds) == (1 if together else 2)
    assert "it ended with 3" in str(found["dies"].failed)
    assert "cannot be started" in str(found["missing"].failed)
    if together:
        shares = [row["agreement"]["first"] for rows in found["differs"].samples.values() for row in rows]
        assert shares == [0] * 6
        assert found["tells"].samples["c=2"][0]["breakdown"] == {"linear": 3.0, "attention": 1.0}
        assert "too large" in str(found["refuses to load"].failed)
        # It is asked for the others, though already its warm-up said what it cannot do.
        assert found["raises"].failed is None
        assert set(found["raises"].samples) == {"c=1", "prefill 1x30"}
        assert list(found["raises"].errors) == ["c=2"]
    assert all(engine.process is None or engine.process.exit_code is not None for engine in engines)
    json.dumps([engine.result() for engine in engines])
    told = summary(engines, CELLS)
    assert told["medians"]["missing"] == {cell.name: {} for cell in CELLS}
    assert list(told["ratios"]) == ["c=1", "c=2", "prefill 1x30", "c=1 end to end", "c=2 end to end"]
    assert (told["ratios"]["prefill 1x30"] is None) == (not together)
    report = Report()
    tell(engines, CELLS, report)
    assert "missing is out: cannot be started" in capsys.readouterr().out
    assert report.failed
    assert {row["engine"] for row in report.rows} == {engine.name for engine in engines}


def test_turns_alternate_and_everybody_begins_once() -> None:
    turns = [(turn.engine, turn.cells[0].name) for turn in schedule("ab", CELLS[:2], 2, together=True)]
    assert turns == [
        ("a", "c=1"), ("b", "c=1"), ("a", "c=2"), ("b", "c=2"),
        ("b", "c=1"), ("a", "c=1"), ("b", "c=2"), ("a", "c=2"),
    ]  # fmt: skip
    alone = list(schedule("ab", CELLS, 2, together=False))
    assert [turn.engine for turn in alone] == ["a", "b", "b", "a"]
    assert all(turn.cells == tuple(CELLS) for turn in alone)


def test_prompts_are_new_in_every_run_and_the_same_for_everybody() -> None:
    seeds = [(cell, round, part) for cell in CELLS for round in range(3) for part in ("first", "whole")]
    made = [prompts(cell, 1000, *seed) for cell, *seed in seeds]
    flat = [tuple(prompt) for run in made for prompt in run]
    assert len(set(flat)) == len(flat)
    assert made == [prompts(cell, 1000, *seed) for cell, *seed in seeds]
    assert all(0 <= token < 1000 for prompt in flat for token in prompt)


# -- arithmetic ----------------------------------------------------------------------------------------


def test_rates_follow_their_definitions() -> None:
    found = figures(Cell(8, 128, 64), 1.5, 4.5)
    assert found["decode_tokens_per_s"] == pytest.approx(8 * 63 / 3.0)
    assert found["end_to_end_tokens_per_s"] == pytest.approx(8 * 64 / 4.5)
    assert found["prefill_tokens_per_s"] == pytest.approx(8 * 128 / 1.5)
    assert figures(Cell(1, 1024, 1), 2.0, None) == {"t1": 2.0, "prefill_tokens_per_s": 512.0}
    # More tokens that took no longer are no rate.
    assert "decode_tokens_per_s" not in figures(Cell(8, 128, 64), 1.5, 1.5)


def test_the_ratio_is_taken_round_by_round_over_the_best() -> None:
    found = ratio({0: 10.0, 1: 30.0}, {"a": {0: 5.0, 1: 30.0}, "b": {0: 8.0, 1: 8.0}, "c": {}})
    assert found == {"best": "a", "median": 1.5, "min": 1.0, "max": 2.0}
    assert ratio({}, {"a": {0: 5.0}}) is None
    assert ratio({0: 10.0}, {}) is None
    assert ratio({0: 10.0}, {"a": {1: 5.0}}) is None


def test_agreement_counts_up_to_the_first_difference() -> None:
    assert agreement([[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 9, 4], [6, 6, 7, 8]]) == {
        "first": 0.5,
        "prefix": 2 / 8,
    }


# -- the command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", get_args(Precision))
def test_a_precision_chooses_engines_that_have_it(precision: Precision) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["--precision", precision])
    complete(options)
    peers = [PEERS[name] for name in options.peers]
    assert peers[0].adapter == "aioinfer_engine"
    assert {peer.precision for peer in peers if peer.name != "aioinfer"} == {precision}
    assert {peer.adapter for peer in peers} >= {"openvino_batching", "llamacpp_batches"}


def test_settings_belong_to_a_peer() -> None:
    assert own_settings(["vllm.enforce_eager=true", "aioinfer.overlap_steps=0", "aioinfer.seed="]) == {
        "vllm": {"enforce_eager": "true"},
        "aioinfer": {"overlap_steps": "0", "seed": ""},
    }
    for text in ("overlap_steps=0", "nobody.overlap_steps=0", "vllm.eager"):
        with pytest.raises(ValueError, match=r"PEER\.NAME=VALUE"):
            own_settings([text])


@pytest.mark.parametrize(
    ("noises", "kept", "taken"), [([0.5, 0.1, 0.0], 1, 2), ([0.5, 0.3, 0.4], 1, 3), ([0.2], 0, 1)]
)
def test_a_disturbed_sample_is_taken_again_with_other_prompts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noises: list[float], kept: int, taken: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(bench.cpu.contest, "_disturbed", lambda sample: noises[sample["attempt"]])
    engine = contestant("well", tmp_path)
    limits = Limits(load=60, run=60, noise=0.25, attempts=3)
    Contest([engine], CELLS[:1], 50, limits).run(2, together=True)
    assert engine.failed is None
    assert [sample["attempt"] for sample in engine.samples["c=1"]] == [kept, kept]
    assert len(engine.tokens) == 2 * taken


def test_a_bench_that_is_terminated_ends_its_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    engine = contestant("terminates", tmp_path)
    contest = Contest([engine], CELLS, 50, Limits(load=60, run=60))
    run = SimpleNamespace(run=lambda options, report: contest.run(1, together=True))
    monkeypatch.setattr(bench.command, "load", lambda name: run)
    with pytest.raises(SystemExit) as leaving:
        execute("cpu", SimpleNamespace(json=None, commit=None))  # type: ignore[arg-type]
    assert leaving.value.code == 128 + signal.SIGTERM
    assert engine.process is not None
    assert engine.process.exit_code == -signal.SIGKILL


@nightly(PROGRAM)
def test_the_bench_runs_with_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = "cpu --peers aioinfer vllm --model tiny --rounds 1 --attempts 1 --concurrency 1 2 --kv-gib 0.01"
    options += f" --prompt-tokens 9 --output-tokens 4 --prefill-tokens 9 --threads 1 --place {tmp_path}/place"
    file = tmp_path / "lines.jsonl"
    assert main([*options.split(), "--json", str(file)]) == 0
    (line,) = map(json.loads, file.read_text().splitlines())
    assert list(line["engines"]) == ["aioinfer"]
    assert list(line["engines"]["aioinfer"]["samples"]) == ["c=1", "c=2", "prefill 1x9"]
    assert line["medians"]["aioinfer"]["prefill 1x9"]["prefill_tokens_per_s"]["median"] > 0
    assert str(tmp_path) not in json.dumps(line["options"])
    said = capsys.readouterr().out
    assert "vllm is not installed (python -m bench.peers install vllm)" in said
    assert "end_to_end" in said


# -- servers -------------------------------------------------------------------------------------------


@rest(SECONDS)
async def test_a_load_on_a_server_counts_all_of_its_tokens(serving: Serving) -> None:
    load = make_load(
        count=12, rate=100, concurrency=None, burstiness=1, prompt_tokens="5", output_tokens="7",
        distinct_prompts=None, vocab=(1, 60), seed=0,
    )  # fmt: skip
    async with serving() as served:
        here: Any = SimpleNamespace(pid=os.getpid(), exit_code=None)
        server = Server("toy", [], {}, served.url, process=here)
        records, seconds, noise = await measure(server, load, 30)
    result = summarise(records, seconds)
    assert (result["requests"], result["failed"], result["output_tokens"]) == (12, 0, 84)
    assert seconds >= load.requests[-1].at
    assert noise["client_cores"] > 0
    server.rounds[1.0] = [{"seconds": seconds, "output_tokens_per_s": 1.0}] * 2
    server.records[1.0] = records + records
    both = pooled(server, 1.0)
    assert both["output_tokens_per_s"] == pytest.approx(result["output_tokens_per_s"])
    assert both["ttft_ms"]["max"] == result["ttft_ms"]["max"]
    assert pooled(server, 2.0) == {"tokens_per_s_by_round": {}}


@rest(SECONDS)
async def test_servers_take_turns_and_one_that_is_gone_is_out(
    serving: Serving, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = parse(
        "cpu",
        f"--serve --model tiny --rounds 2 --rates 50 200 --requests 5 --prompt-tokens 5 --output-tokens 7 "
        f"--json {tmp_path / 'lines.jsonl'} --lock {tmp_path / 'lock'}".split(),
    )
    turns: list[str] = []
    async with serving() as served:
        here: Any = SimpleNamespace(
            pid=os.getpid(), exit_code=None, log=tmp_path / "log", kill=lambda: None,
            resume=lambda: turns.append("resume"), pause=lambda: turns.append("pause"),
        )  # fmt: skip
        toy = Server("toy", [], {}, served.url, process=here)
        gone = Server("gone", [], {}, f"http://127.0.0.1:{free_port()}", process=here)
        await contest([toy, gone], 60, options)
    # Getting it going, and two rates in each of two rounds; the other was asked once.
    assert turns == ["resume", "pause", "resume"] + ["resume", "pause"] * 4
    assert "Cannot connect" in str(gone.failed)
    assert gone.process is None
    report = Report()
    bench.cpu.serving.tell([toy, gone], options.rates, report)
    assert report.failed
    line = report.as_dict()
    assert [row["output_tokens"] for row in line["rounds"]["toy"]["200"]] == [35, 35]
    assert line["servers"]["toy"]["50"]["requests"] == 10
    assert line["servers"]["gone"]["50"] == {"tokens_per_s_by_round": {}}
    assert "gone is out: Client" in capsys.readouterr().out


@rest(SECONDS)
def test_a_busy_loop_is_measured_beside_an_idle_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(ROOT / "aioinfer" / "bundled" / "tiny-chat")
    line = tmp_path / "line.json"
    options = (
        f"--busy --model {model} --threads 1 --rounds 1 --concurrency 2 --prompt-tokens 4 --output-tokens 9"
    )
    assert main(["cpu", *options.split(), "--json", str(line)]) == 0
    rows = json.loads(line.read_text())["rows"]
    assert [(row["kernels"], row["threads"]) for row in rows] == [("native", 1), ("sdpa", 1)]
    for times in rows:
        assert times["slower"] == times["busy_ms"] / times["idle_ms"] - 1


@rest(SECONDS)
@pytest.mark.native
def test_rounded_weights_are_compared_with_others_on_the_same_questions(tmp_path: Path) -> None:
    line = tmp_path / "line.json"
    assert main(["cpu", "--accuracy", "--requests", "2", "--json", str(line)]) == 0
    found = {row["weights"]: row for row in json.loads(line.read_text())["rows"]}
    assert set(found) == {"bfloat16", "int8", "int4", "float32"}
    assert found["bfloat16"]["logprobs_apart"] == 0 < found["float32"]["logprobs_apart"]
    assert found["int8"]["copy"] == 1.0


@rest(SECONDS)
@pytest.mark.native
def test_the_perplexity_of_rounded_weights_is_compared_with_the_exact_one(tmp_path: Path) -> None:
    line, model = tmp_path / "line.json", ROOT / "aioinfer" / "bundled" / "tiny-chat"
    assert main(f"cpu --accuracy --model {model} --requests 2 --json {line}".split()) == 0
    found = {row["weights"]: row for row in json.loads(line.read_text())["rows"]}
    assert found["bfloat16"]["more"] == 0
    assert all(1 < row["perplexity"] < 10_000 for row in found.values())
    assert 0 < abs(found["int8"]["more"]) < 0.05
