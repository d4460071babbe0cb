"""The examples run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import PROGRAM, nightly, rest

ROOT = Path(__file__).parents[2]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=240)


@nightly(PROGRAM)
def test_the_embedding_example_runs() -> None:
    done = run("examples/embed.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Once there was a child called Mira")
    assert "44 + 44 = 88" in done.stdout


@nightly(PROGRAM)
def test_the_diffusion_example_shows_a_block_filling_up() -> None:
    command = ["examples/diffusion_stream.py", "What is 17 + 25?", "--threshold", "1"]
    done = run(*command)
    assert done.returncode == 0, done.stderr
    *drafts, last = done.stdout.splitlines()
    assert last == "17 + 25 = 42"
    assert any("░" in draft for draft in drafts)
    assert re.search(r"\d+ tokens in \d+ rounds", done.stderr)
    wrong = run(*command, "--algorithm", "factor")
    assert (wrong.returncode, wrong.stderr) == (1, "threshold: is not a parameter of factor\n")


@nightly(PROGRAM)
def test_the_form_example_obeys_a_schema_a_choice_and_a_template() -> None:
    done = run("-m", "examples.diffusion_forms")
    assert done.returncode == 0, done.stderr
    pet = '{"kind": "cat", "color": "black"}'
    assert f'\n{{"name": "Tom", "age": 31, "pet": {pet}, "city": "Rome"}}\n' in done.stdout
    assert "\nanimal\n" in done.stdout
    assert done.stdout.endswith("Tom lives in Rome.\n{'name': 'Tom', 'city': 'Rome'}\n")


@rest(PROGRAM)
def test_the_agent_says_what_it_is_called_with() -> None:
    done = run("examples/agent.py")
    assert (done.returncode, done.stderr) == (1, "usage: examples/agent.py MODEL QUESTION\n")


@nightly(PROGRAM)
def test_extraction_takes_any_model() -> None:
    done = run("examples/extraction.py", "smollm2-135m")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("name='Tom' kind='cat' age=14\n")


@nightly(PROGRAM)
@pytest.mark.parametrize("name", ["race", "extraction", "custom_policy", "tree_search"])
def test_the_other_examples_run(name: str) -> None:
    done = run(f"examples/{name}.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@nightly(PROGRAM)
def test_a_saved_conversation_goes_on_in_another_process() -> None:
    done = run("examples/sessions.py")
    assert done.returncode == 0, done.stderr
    *talk, saved = done.stdout.splitlines()
    assert [line.partition(" (")[0] for line in talk[1:]] == [
        f"  What is {number} + {number}? {number} + {number} = {2 * number}" for number in (19, 20, 21)
    ]
    again = run("examples/sessions.py", "--load", saved.removeprefix("saved as "))
    assert again.returncode == 0, again.stderr
    found = re.match(
        r"(\d+) tokens, (\d+) of them need not be computed\nWhat is 30 \+ 12\? 30 \+ 12 = 42 ", again.stdout
    )
    assert found is not None, again.stdout
    assert 0 < int(found[2]) < int(found[1])


@rest(PROGRAM)
def test_a_million_users_are_counted_in_cells_of_replicas() -> None:
    done = run("examples/million_users.py", "--minutes", "0.02", "--cell", "2")
    assert done.returncode == 0, done.stderr
    assert "1,667 requests/s" in done.stdout
    assert "cells of 2" in done.stdout
    assert "dies" in done.stdout
