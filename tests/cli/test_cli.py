"""The command line, as a user runs it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from aioinfer.cli.main import main
from aioinfer.config import GROUPS, EngineConfig, ServerConfig


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aioinfer", *arguments], capture_output=True, text=True, timeout=120
    )


def test_generate_streams_an_answer() -> None:
    done = run("generate", "What is 20 + 22?", "--threads", "1", "--stats")
    assert done.stdout == "20 + 22 = 42\n"
    assert "tokens/s" in done.stderr


def test_a_missing_model_is_one_clear_line() -> None:
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


def test_help_shows_every_setting_in_its_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    sections = {part.split(":\n", 1)[0]: part for part in shown.split("\n\n")}
    for item in (*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)):
        flag = f"  --{item.name.replace('_', '-')} "
        assert shown.count(flag) == 1, flag
        # drain_timeout belongs to both classes: the flag is in the engine's group.
        assert flag in sections[GROUPS[item.metadata["group"]]], flag
    assert list(GROUPS.values()) == [name for name in sections if name in GROUPS.values()]
    assert len(shown.splitlines()) < 150


def test_help_names_values_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(auto|triton|native|sdpa; default: auto)" in shown
    assert "(default: false)" in shown
    assert "(default: 64)" in shown
