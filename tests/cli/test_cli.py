"""The command line, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aioinfer.cli.main import main


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aioinfer", *arguments], capture_output=True, text=True, timeout=120
    )


def test_generate_streams_an_answer() -> None:
    done = run("generate", "What is 20 + 22?", "--threads", "1", "--stats")
    assert done.stdout == "20 + 22 = 42\n"
    assert "tokens/s" in done.stderr


def test_a_model_that_is_not_there_is_one_clear_line() -> None:
    done = run("generate", "x", "--model", "/nowhere")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "/nowhere" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--overlap-steps", "9"], "overlap_steps"),
        (["serve", "--overlap-steps", "x"], "overlap_steps"),
        (["serve", "--host", "0.0.0.0"], "loopback"),
        (["serve", "--config", "/nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_bad_settings_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_settings_file_with_a_typo_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("windw: 1\n")
    assert main(["serve", "--config", str(file)]) == 2
    assert "windw" in capsys.readouterr().err
