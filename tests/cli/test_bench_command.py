"""``aioinfer bench``: figures of an installed package."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from aioinfer.cli.main import main
from tests.observe.test_timeline import read_trace

OPTIONS = "--requests 3 --concurrency 2 --prompt-tokens 8 --output-tokens 4 --threads 1"


def test_figures_and_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    assert main(["bench", "tiny-chat", *OPTIONS.split(), "--trace", str(file)]) == 0
    shown = capsys.readouterr().out
    for name in ("requests", "prompt tokens/s", "output tokens/s", "first token", "per token", "engine"):
        assert re.search(rf"^{name}.* \S", shown, re.M), name
    assert re.search(r"^requests +3 in ", shown, re.M)
    lanes = read_trace(file.read_text())
    assert all(lanes.values())
    assert f"{sum(map(len, lanes.values()))} events" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "--requests must be from 1"),
        (["--concurrency", "-1"], "--concurrency must be"),
        (["--output-tokens", "999999"], "exceed the context"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "tiny-chat", "--threads", "1", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_trace_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tiny-chat", *OPTIONS.split(), "--trace", "/no/such/directory/x"]) == 1
    assert capsys.readouterr().err.count("\n") == 1
