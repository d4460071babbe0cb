"""Every bench has the same command line and the same report; loads and figures follow their definitions."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import bench.command
from bench.beside import beside, groups, told
from bench.command import BENCHES, BadOptions, main, parse
from bench.load import Record, length_distribution, make_load, summarise, url_target
from bench.report import Report, percentiles
from bench.serving import measure
from tests.server.conftest import Serving, serving
from tests.tiers import PROGRAM, SECONDS, nightly, points, rest

__all__ = ["serving"]

ROOT = Path(__file__).parents[2]


# -- the command line ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BENCHES)
def test_every_bench_describes_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([name, "--help"])
    assert leaving.value.code == 0
    said = capsys.readouterr().out
    assert f"usage: python -m bench {name} " in said
    assert f"``python -m bench {name}``" in said
    assert "--json FILE" in said


def test_without_a_name_the_benches_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == main(["nothing"]) == 2
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f"  {name} " in said for name in BENCHES)


class Fake:
    """A bench that does what a test tells it to, after its first row."""

    __doc__ = "``python -m bench fake``"

    def __init__(self, end: Any) -> None:
        self.end = end

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--place", type=Path)
        parser.add_argument("--model")

    def run(self, options: argparse.Namespace, report: Report) -> None:
        report.row(case="a", us=1.5, rounds=[1, 2])
        self.end(report)


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("end", "status", "errors"),
    [
        (lambda report: None, 0, []),
        (lambda report: report.error("e"), 1, ["e"]),
        (lambda report: report.section("s", "title").error("e"), 1, []),
        (lambda report: _raise(ArithmeticError("on purpose")), 1, ["ArithmeticError: on purpose"]),
        (lambda report: _raise(KeyboardInterrupt()), KeyboardInterrupt, ["interrupted: KeyboardInterrupt"]),
        (lambda report: os.kill(os.getpid(), signal.SIGTERM), SystemExit, ["interrupted: SystemExit(143)"]),
        (lambda report: _raise(BadOptions("no")), SystemExit, None),
    ],
)
def test_a_bench_that_ends_early_has_its_line(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    end: Any,
    status: int | type[BaseException],
    errors: list[str] | None,
) -> None:
    """Whatever ends it, its rows are written, without paths; wrong options write nothing."""
    monkeypatch.setitem(BENCHES, "fake", "for this test")
    monkeypatch.setattr(bench.command, "load", lambda name: Fake(end))
    before = signal.getsignal(signal.SIGTERM)
    file = tmp_path / "lines.jsonl"
    arguments = ["fake", "--place", "/x", "--model", "/a/b", "--json", str(file), "--commit", "abc"]
    if isinstance(status, int):
        assert main(arguments) == status
    else:
        with pytest.raises(status):
            main(arguments)
    assert signal.getsignal(signal.SIGTERM) is before
    if errors is None:
        assert not file.exists()
        return
    (line,) = map(json.loads, file.read_text().splitlines())
    assert (line["bench"], line["rows"]) == ("fake", [{"case": "a", "us": 1.5, "rounds": [1, 2]}])
    said = line.get("errors", [])
    assert len(said) == len(errors)
    assert all(wanted in error for wanted, error in zip(errors, said, strict=True))
    assert line["options"] == {"model": "b"}
    assert line["environment"]["commit"] == "abc"
    assert line["environment"]["versions"]["torch"]


def test_a_table_has_a_head_for_every_kind_of_row(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    for row in ({"case": "a", "us": 1.25}, {"case": "b", "us": 12_345.6}, {"case": "c", "error": None}):
        report.row(**row)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["case", "us"], ["a", "1.25"], ["b", "12,346"], ["case", "error"], ["c"],
    ]  # fmt: skip
    assert lines[0].index("us") + 2 == len(lines[1]) == len(lines[2])


def test_a_report_is_read_back_from_its_journal(tmp_path: Path) -> None:
    kept, read = Report(tmp_path / "journal"), Report()
    kept.keep_environment()
    kept.fact("a", 1)
    kept.note("n")
    kept.row(x=1)
    with kept.case("a case"):
        _raise(ValueError("on purpose"))
    read.replay(tmp_path / "journal")
    assert read.as_dict() == kept.as_dict()
    assert read.environment == kept.environment
    assert "on purpose" in read.errors[0]


# -- each bench in its smallest form -------------------------------------------------------------------


def run(name: str, options: str, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "line.json"
    assert main([name, *options.split(), "--json", str(file)]) == 0
    line: dict[str, Any] = json.loads(file.read_text())
    return line


@rest(SECONDS)
@pytest.mark.parametrize(
    ("name", "options", "rows"),
    points(
        [
            ("scheduler", "--running 1 4 --waiting 0 8 --cached-pages 16 --steps 3 --rounds 1", 8),
            ("admission", "--requests 8 --rounds 1", 16),
            ("deadlines", "--requests 8 --loads 1 --policies fcfs slack", 6),
            ("promises", "--requests 80 --loads 1.3 --sample 1 --itl 0.05 --chunks 64", 3),
            ("prefix", "--requests 4 --rounds 1 --output 2 --system 16 --loads system none", 6),
            ("overlap", "--batch 2 --rounds 1 --output 4", 4),
            ("overlap", "--batch 2 --rounds 1 --output 4 --toy", 3),
            ("adapters", "--shape tiny --steps 3 --prompt 16 --rounds 1 --loads 1 --threads 1", 12),
            ("weights", "--shape tiny --updates 1 --streams 2 --threads 1", 2),
            ("threads", "--callers 1 2 --sums 4 --rounds 2", 2),
            ("serving", "--requests 8 --concurrency 4 --threads 1 --output-tokens uniform:2:6", 4),
            ("constraints", "--concurrency 1 2 --rounds 1 --requests 2 --per-client 1", 10),
            (
                "diffusion",
                "--shape tiny --concurrency 1 --fresh 0 1 --rounds 1 --requests 2 --per-client 1 "
                "--max-tokens 20",
                10,
            ),
        ],
        [
            ("overlap", "--batch 2 --rounds 1 --stall", 6),
            ("cpu", "--accuracy --requests 1", 4),
        ],
    ),
)
def test_a_bench_has_its_rows(tmp_path: Path, name: str, options: str, rows: int) -> None:
    line = run(name, options, tmp_path)
    assert len(line["rows"]) == rows


@nightly(PROGRAM)
@pytest.mark.parametrize(
    ("name", "options", "sections"),
    [
        ("embed", "--inputs 2 --tokens 16 --rounds 1 --output 4 --threads 1", {"throughput": 3, "beside": 2}),
        ("fanout", "--streams 8 --seconds 0.2 --rounds 1", {"saturated": 1, "paced": 1, "inprocess": 2}),
        (
            "parallel",
            "--workloads bursts --replicas 2 --seeds 1 --streams 8 --seconds 0.2 --rounds 1",
            {"policies": 6, "cost": 2, "failover": 2},
        ),
        (
            "sessions",
            "--quick",
            {
                "restart": 1,
                "turn": 1,
                "fork": 1,
                "save": 8,
                "off": 4,
                "rag": 3,
                "disaggregation": 3,
                "commit": 3,
                "llamacpp": 1,
            },
        ),
        ("gpu", "--rehearse", {"model": 2, "offline": 2, "overlap": 2, "endpoint": 2}),
    ],
)
def test_a_bench_has_its_sections(tmp_path: Path, name: str, options: str, sections: dict[str, int]) -> None:
    found = run(name, options, tmp_path)["sections"]
    assert {part: len(section["rows"]) for part, section in found.items()} == sections


@nightly(PROGRAM)
def test_an_attack_has_a_row_for_each_number_of_replicas(tmp_path: Path) -> None:
    line = run("attack", "--only multiple-of admin-port frozen --alone 1 --replicas 2", tmp_path)
    assert [row["attack"] for row in line["rows"]] == ["multiple-of", "admin-port", "frozen"]
    assert not any(row["lost"] for row in line["rows"])


@nightly(PROGRAM)
def test_the_speculation_bench_compares_with_and_without_drafts(tmp_path: Path) -> None:
    options = "--only oracle edits free pair --model tiny --output 12 --rounds 1 --items 2 --threads 1"
    sections = run("speculation", f"{options} --place {tmp_path}", tmp_path)["sections"]
    for section in sections.values():
        for row in section["rows"]:
            assert row["tok_s"] > 0 < row["plain_tok_s"]
            assert row["outputs"] > 0 == row["differing"]
    assert all(row["accepted"] == 1 for row in sections["oracle"]["rows"])
    assert not any(row["accepted"] for row in sections["free"]["rows"])


@rest(SECONDS)
@pytest.mark.parametrize("how", [["--concurrency", "4"], ["--rate", "200"]])
async def test_the_bench_counts_every_token_over_http(
    serving: Serving, how: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The toy has 64 tokens.
    monkeypatch.setattr("bench.serving.VOCAB", (1, 60))
    async with serving() as one, serving() as other:
        arguments = (
            f"--url {one.url} {other.url} --rounds 2 --requests 20 --prompt-tokens 5 --output-tokens 7"
        )
        found = await measure(parse("serving", [*arguments.split(), *how]))
    assert list(found) == [one.url, other.url]
    for result, error in found.values():
        assert error is None
        assert (result["requests"], result["failed"]) == (40, 0)
        assert result["output_tokens"] == 40 * 7
        assert result["prompt_tokens"] == 40 * 5
        assert result["ttft_ms"]["p50"] <= result["latency_ms"]["p50"]


async def test_prompts_arrive_beside_streams(serving: Serving) -> None:
    async with serving() as one, url_target(one.url) as ask:
        figures, gaps = await beside(ask, 3, 2, 9, (1, 60), 0)
        alone, none = await beside(ask, 0, 2, 9, (1, 60), 0)
        assert not one.engine.stats().running
    assert gaps
    assert not none
    for each in (figures, alone):
        assert 0 < each["ttft_s_mean"] <= each["ttft_s_max"]
        assert each["prompt_tokens_per_s"] == pytest.approx(18 / each["ttft_s_max"])
    row = told([figures, alone, alone], [0.1, 0.3])
    assert row["gap_ms_max"] == pytest.approx(300)
    assert row["ttft_s_max"] == sorted(each["ttft_s_max"] for each in (figures, alone, alone))[1]
    assert told([alone], none)["gap_ms_max"] is None


def test_groups_of_prompts_are_numbers_and_lengths() -> None:
    assert groups(["4x900", "1x8000"]) == [(4, 900), (1, 8000)]
    for bad in ("4", "x", "0x9", "1x2x3"):
        with pytest.raises(ValueError, match=r"."):
            groups([bad])


# -- definitions ---------------------------------------------------------------------------------------


def test_figures_follow_their_definitions() -> None:
    record = Record(sent=1.0, arrivals=[(1.5, 1), (1.7, 2), (2.0, 1)], prompt_tokens=3)
    assert (record.tokens, record.ttft, record.latency) == (4, 0.5, 1.0)
    assert record.itl() == pytest.approx([0.1, 0.1, 0.3])
    result = summarise([record, Record(error="x")], seconds=2.0)
    assert (result["failed"], result["output_tokens_per_s"]) == (1, 2.0)
    assert result["tpot_ms"]["p50"] == pytest.approx(1e3 * 0.5 / 3)
    assert percentiles([1, 2, 3, 4])["p50"] == 2.5


def test_loads_repeat_with_their_seed() -> None:
    def load(seed: int) -> Any:
        lengths = {"prompt_tokens": "uniform:1:9", "output_tokens": "lognormal:2:0.5:20"}
        return make_load(count=10, rate=5, concurrency=None, vocab=(1, 9), seed=seed, **lengths)

    assert load(1) == load(1) != load(2)


@pytest.mark.parametrize("text", ["", "abc", "uniform:1", "normal:1:2"])
def test_an_unknown_distribution_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"distribution|invalid literal"):
        length_distribution(text)(random.Random(0))
