"""The examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.tiers import PROGRAM, nightly, rest

ROOT = Path(__file__).parents[2]


@nightly(PROGRAM)
def test_the_embedding_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, "examples/embed.py"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once there was a child called Mira")
    assert "44 + 44 = 88" in done.stdout


@nightly(PROGRAM)
def test_the_diffusion_example_shows_a_block_filling_up() -> None:
    command = [sys.executable, "examples/diffusion_stream.py", "What is 17 + 25?", "--threshold", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    *drafts, last = done.stdout.splitlines()
    assert last == "17 + 25 = 42"
    assert any("░" in draft for draft in drafts)
    assert re.search(r"\d+ tokens in \d+ rounds", done.stderr)
    wrong = subprocess.run(
        [*command, "--algorithm", "factor"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert wrong.returncode == 1
    assert wrong.stderr == "threshold: is not a parameter of factor\n"


@rest(PROGRAM)
def test_the_agent_says_what_it_is_called_with() -> None:
    done = subprocess.run(
        [sys.executable, "examples/agent.py"], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    assert done.stderr == "usage: examples/agent.py MODEL QUESTION\n"
