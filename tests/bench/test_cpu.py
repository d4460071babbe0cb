"""The CPU bench takes turns, goes on without engines that fail, and computes figures as they are defined."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from bench.command import BadOptions, main
from bench.cpu.command import add_arguments, own_settings, peers_of
from bench.cpu.contest import Cell, Contest, Contestant, Limits, figures, prompts, ratio, schedule, tell
from bench.peers.registry import Precision
from bench.peers.watch import Watch
from bench.report import Report
from tests.bench.fake_peer import SETTINGS, command_of
from tests.tiers import PROGRAM, SECONDS, nightly, rest

ROOT = Path(__file__).parents[2]
CELLS = [Cell(1, 5, 8), Cell(2, 5, 8), Cell(1, 30, 1)]


def contestant(mode: str, tmp_path: Path) -> Contestant:
    return Contestant(mode, command_of(mode), ROOT, tmp_path / f"{mode}.log", dict(SETTINGS))


@rest(SECONDS)
def test_a_contest_goes_on_without_those_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    modes = ["well", "differs", "raises", "dies", "refuses to load"]
    engines = [contestant(mode, tmp_path) for mode in modes]
    Contest(engines, CELLS, 50, Limits(load=60, run=60)).run(2)
    found = {engine.name: engine for engine in engines}
    for name in ("well", "differs"):
        assert {cell: len(rows) for cell, rows in found[name].samples.items()} == {
            "c=1": 2, "c=2": 2, "prefill 1x30": 2
        }  # fmt: skip
        assert found[name].peak_mib > 5
        assert found[name].failed is None
    assert "it ended with 3" in str(found["dies"].failed)
    assert "too large" in str(found["refuses to load"].failed)
    # It is asked for the other cells, though already its warm-up said what it cannot do.
    assert found["raises"].failed is None
    assert set(found["raises"].samples) == {"c=1", "prefill 1x30"}
    assert list(found["raises"].errors) == ["c=2"]
    assert all(engine.process is None or engine.process.exit_code is not None for engine in engines)
    report = Report()
    tell(engines, CELLS, report)
    assert report.failed
    same = {row["engine"]: row["same_first"] for row in report.rows if "same_first" in row}
    assert (same["well"], same["differs"]) == (1, 0)
    # A fake is too fast for a decode rate now and then.
    compared = {row["cell"] for row in report.rows if "over" in row}
    assert {"c=1 end to end", "c=2 end to end", "prefill 1x30"} <= compared
    json.dumps(report.as_dict())


@pytest.mark.parametrize(
    ("noises", "kept", "taken"), [([0.5, 0.1, 0.0], 0.1, 2), ([0.5, 0.3, 0.4], 0.3, 3), ([0.2], 0.2, 1)]
)
def test_a_disturbed_sample_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noises: list[float], kept: float, taken: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    left = [0.0, *noises]  # loading is watched, too
    end = Watch.__exit__

    def ends(self: Watch, *error: Any) -> None:
        end(self, *error)
        self._use.others_cores = left.pop(0)

    monkeypatch.setattr(Watch, "__exit__", ends)
    engine = contestant("well", tmp_path)
    Contest([engine], CELLS[:1], 50, Limits(load=60, run=60, noise=0.25, attempts=3)).run(1)
    assert engine.failed is None
    assert [sample["others_cores"] for sample in engine.samples["c=1"]] == [kept]
    assert len(left) == len(noises) - taken


def test_turns_alternate_and_every_engine_begins_once() -> None:
    turns = [(engine, cell.name) for _, engine, cell in schedule("ab", CELLS[:2], 2)]
    assert turns == [
        ("a", "c=1"), ("b", "c=1"), ("a", "c=2"), ("b", "c=2"),
        ("b", "c=1"), ("a", "c=1"), ("b", "c=2"), ("a", "c=2"),
    ]  # fmt: skip


def test_prompts_are_new_in_every_run_and_the_same_for_every_engine() -> None:
    seeds = [(cell, turn, part) for cell in CELLS for turn in range(3) for part in ("first", "whole")]
    made = [prompts(cell, 1000, *seed) for cell, *seed in seeds]
    flat = [tuple(prompt) for run in made for prompt in run]
    assert len(set(flat)) == len(flat)
    assert made == [prompts(cell, 1000, *seed) for cell, *seed in seeds]
    assert all(0 <= token < 1000 for prompt in flat for token in prompt)


def test_rates_follow_their_definitions() -> None:
    found = figures(Cell(8, 128, 64), 1.5, 4.5)
    assert found["decode_tokens_per_s"] == pytest.approx(8 * 63 / 3.0)
    assert found["end_to_end_tokens_per_s"] == pytest.approx(8 * 64 / 4.5)
    assert found["prefill_tokens_per_s"] == pytest.approx(8 * 128 / 1.5)
    assert figures(Cell(1, 1024, 1), 2.0, None) == {"prefill_tokens_per_s": 512.0}
    # More tokens that took no longer are no rate.
    assert "decode_tokens_per_s" not in figures(Cell(8, 128, 64), 1.5, 1.5)


def test_the_ratio_is_taken_round_by_round_over_the_best() -> None:
    found = ratio({0: 10.0, 1: 30.0}, {"a": {0: 5.0, 1: 30.0}, "b": {0: 8.0, 1: 8.0}, "c": {}})
    assert found == {"over": "a", "median": 1.5, "min": 1.0, "max": 2.0}
    assert ratio({}, {"a": {0: 5.0}}) is None
    assert ratio({0: 10.0}, {}) is None
    assert ratio({0: 10.0}, {"a": {1: 5.0}}) is None


@pytest.mark.parametrize("precision", get_args(Precision))
def test_a_precision_chooses_engines_that_have_it(precision: Precision) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    peers = peers_of(parser.parse_args(["--precision", precision]))
    assert peers[0].adapter == "aioinfer_engine"
    assert {peer.precision for peer in peers if peer.name != "aioinfer"} == {precision}
    assert {peer.adapter for peer in peers} >= {"openvino_batching", "llamacpp_batches"}


def test_settings_belong_to_a_peer() -> None:
    assert own_settings(["vllm.enforce_eager=true", "aioinfer.overlap_steps=0", "aioinfer.seed="]) == {
        "vllm": {"enforce_eager": "true"},
        "aioinfer": {"overlap_steps": "0", "seed": ""},
    }
    for text in ("overlap_steps=0", "nobody.overlap_steps=0", "vllm.eager"):
        with pytest.raises(BadOptions, match=r"PEER\.NAME=VALUE"):
            own_settings([text])


@nightly(PROGRAM)
def test_the_bench_runs_with_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "cpu --peers aioinfer vllm --model tiny --rounds 1 --attempts 1 --concurrency 1 2 --kv-gib 0.01"
    options += f" --prompt-tokens 9 --output-tokens 4 --prefill-tokens 9 --threads 1 --place {tmp_path}/place"
    file = tmp_path / "lines.jsonl"
    assert main([*options.split(), "--json", str(file)]) == 0
    (line,) = map(json.loads, file.read_text().splitlines())
    assert list(line["engines"]) == ["aioinfer"]
    assert list(line["engines"]["aioinfer"]["samples"]) == ["c=1", "c=2", "prefill 1x9"]
    assert str(tmp_path) not in json.dumps(line["options"])
    assert "vllm is not installed (python -m bench.peers install vllm)" in capsys.readouterr().out
