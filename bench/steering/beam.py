"""``beam``: beam search beside vLLM's, by the contest of ``python -m bench cpu``."""

from __future__ import annotations

import argparse

from bench.command import load, parse
from bench.report import Report
from bench.steering.setting import path_of, tell

__all__ = ["beam"]


def beam(options: argparse.Namespace, report: Report) -> None:
    """Rows of the contest, whose tokens are those of the best hypothesis: as many as each beam has."""
    output, rounds = (4, 1) if options.quick else (32, -(-options.rounds // 8))
    arguments = ["--peers", "aioinfer-beams", "vllm-beams", "--model", path_of(options.models[-1], options)]
    arguments += ["--concurrency", *map(str, options.prompts), "--prefill-tokens", "0", "--attempts", "1"]
    arguments += ["--output-tokens", str(output), "--rounds", str(rounds), "--threads", str(options.threads)]
    arguments += ["--kv-gib", "0.1" if options.quick else "2", "--place", str(options.place)]
    load("cpu").run(parse("cpu", arguments), report)
    for row in [row for row in report.rows if "over" in row]:
        tell(report, f"{row['cell']}: tokens/s of beams, of {row['over']}'s", row["median"], least=3)
