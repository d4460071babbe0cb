"""The command line, as a user runs it."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioinfer.cli import terminal
from aioinfer.cli.flags import COMMON, read_settings
from aioinfer.cli.main import _parser, main
from aioinfer.cli.terminal import Progress
from aioinfer.config import GROUPS, EngineConfig, ReplicaConfig, ServerConfig
from aioinfer.testing import FakeEngine
from tests.server.pictures import picture
from tests.tiers import PROGRAM, SECONDS, rest

#: of a start for which there are no kernels yet
COMPILING = "aioinfer: compiling native kernels, once for this processor: takes about half a minute\n"

SETTINGS = {item.name: item for cls in (ServerConfig, EngineConfig) for item in dataclasses.fields(cls)}


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aioinfer", *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )


@rest(PROGRAM)
def test_a_first_start_says_what_takes_long_before_it_begins_and_not_in_the_output(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo 1\necho no room >&2\nexit 1\n')
    compiler.chmod(0o755)
    places = {"AIOINFER_CACHE": str(tmp_path / "cache"), "AIOINFER_CXX": str(compiler)}
    done = run("generate", "What is 20 + 22?", "--threads", "1", "--device", "cpu", "--stats", **places)
    assert done.stdout == "20 + 22 = 42\n"
    assert done.stderr.startswith(COMPILING)
    assert "the compiler failed: no room" in done.stderr.removeprefix(COMPILING)
    assert "tokens/s" in done.stderr


def test_the_line_about_compiling_comes_once_and_other_stages_have_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    progress = Progress()
    for stage, done in (("download", 0), ("kernels", 0), ("kernels", 3), ("kernels", 5), ("weights", 1)):
        progress(stage, done, 5)
    assert capsys.readouterr().err == COMPILING


@rest(SECONDS)
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
        (["generate", "hello", "--overlap-steps", "x"], "overlap_steps"),
        (["chat", "--overlap-steps", "x"], "overlap_steps"),
    ],
)
def test_bad_settings_are_refused_before_libraries_are_loaded(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "import_extensions", lambda: pytest.fail("libraries are loaded first"))
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], (False, True)),
        (["--access-log", "--no-prefix-cache"], (True, False)),
        (["--no-access-log", "--prefix-cache"], (False, True)),
        (["--access-log", "true", "--prefix-cache", "No"], (True, False)),
        (["--access-log=1", "--prefix-cache=off"], (True, False)),
        (["--access-log", "--no-access-log"], (False, True)),
    ],
)
def test_switches_are_given_alone_negated_or_with_a_value(
    arguments: list[str], expected: tuple[bool, bool]
) -> None:
    for given in (["serve", "a-model", *arguments], ["serve", *arguments, "a-model"]):
        options = _parser().parse_args(given)
        server, engine = read_settings(ServerConfig, options), read_settings(EngineConfig, options)
        assert (server.access_log, engine.prefix_cache) == expected
        assert engine.model == "a-model"


def test_every_switch_can_be_negated() -> None:
    for name, item in SETTINGS.items():
        if isinstance(item.default, bool):
            for flag, value in ((name, "true"), (f"no_{name}", "false")):
                options = _parser().parse_args(["serve", f"--{flag.replace('_', '-')}"])
                assert getattr(options, name) == value


@pytest.mark.parametrize("flag", ["--no-access-log=true", "--access-log=maybe"])
def test_a_switch_with_a_wrong_value_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["serve", flag])
    except SystemExit as left:
        status = left.code  # type: ignore[assignment]
    assert status == 2
    assert "access" in capsys.readouterr().err


def shown_help(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as left:
        main([*arguments])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")


def shown_flag(name: str) -> str:
    flag = f"  --{name.replace('_', '-')}"
    return f"{flag}, --no-" if SETTINGS[name].type.startswith("bool") else f"{flag} "


@pytest.mark.usefixtures("wide")
def test_help_is_short_and_groups_and_all_show_the_other_settings(capsys: pytest.CaptureFixture[str]) -> None:
    whole, short = shown_help(capsys, "serve", "--help", "all"), shown_help(capsys, "serve", "--help")
    sections = {part.split(":\n", 1)[0]: part for part in whole.split("\n\n")}
    assert list(GROUPS.values()) == [name for name in sections if name in GROUPS.values()]
    assert len(short.splitlines()) <= 62
    assert "--config" in short
    assert set(COMMON) <= SETTINGS.keys() | {item.name for item in dataclasses.fields(ReplicaConfig)}
    for group, title in GROUPS.items():
        assert any(line.split()[:1] == [group] and title in line for line in short.splitlines()), group
        of_group = shown_help(capsys, "serve", f"--help={group}")
        for name, item in SETTINGS.items():
            # drain_timeout belongs to both classes: the flag is in the engine's group.
            assert (shown_flag(name) in of_group) == (item.metadata["group"] == group), name
    for name, item in SETTINGS.items():
        flag = shown_flag(name)
        assert whole.count(flag) == 1, flag
        assert flag in sections[GROUPS[item.metadata["group"]]], flag
        assert (flag in short) == (name in COMMON), name


@pytest.mark.usefixtures("wide")
@pytest.mark.parametrize("topic", ["max-body", "max_body", "--max-body", "MAX-BODY"])
def test_help_on_part_of_a_name_shows_those_settings(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = shown_help(capsys, "serve", f"--help={topic}")
    assert "--max-body-mib" in shown
    assert "--max-body-values" in shown
    assert "--port" not in shown


@pytest.mark.parametrize("topic", ["no-such-topic", "", "é" * 500])
def test_help_on_nothing_is_a_short_error(topic: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", f"--help={topic}"])
    assert left.value.code == 2
    complaint = capsys.readouterr().err
    assert "scheduling" in complaint
    assert len(complaint) < 700


@pytest.mark.parametrize("command", ["serve", "replica", "generate", "doctor", "trace", "models"])
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown_help(capsys, command, "--help").startswith(f"usage: aioinfer {command}")


def test_help_names_values_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    shown = " ".join(shown_help(capsys, "serve", "--help", "all").split())
    assert "(auto|triton|flashinfer|native|sdpa; default: auto)" in shown
    assert "(default: false)" in shown
    assert "(default: 64)" in shown


@pytest.mark.native
@rest(PROGRAM)
def test_an_answer_about_an_image_is_all_that_is_printed() -> None:
    """The readme's command; where Triton is installed, too, which reports leaks."""
    drawing = Path(__file__).parents[2] / "docs" / "drawing.png"
    done = run(
        "generate", "--model", "tiny-vision", "--image", str(drawing), "What is this?", "--device", "cpu"
    )
    assert done.stdout == "A red star on a white background.\n"
    assert done.stderr.removeprefix(COMPILING) == ""


def test_an_image_is_given_with_the_prompt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engines = []

    async def own_engine(options: Any) -> FakeEngine:
        engine = FakeEngine("Red.", images=True)
        await engine.start()
        engines.append(engine)
        return engine

    monkeypatch.setattr(sys.modules["aioinfer.cli.main"], "own_engine", own_engine)
    image = tmp_path / "red.png"
    image.write_bytes(picture("red"))
    assert main(["generate", "Which colour?", "--image", str(image), "--image", str(image)]) == 0
    assert capsys.readouterr().out == "Red.\n"
    assert engines[0].requests[0].prompt == "user: <image><image>Which colour?\nassistant: "
    assert main(["generate", "Which colour?", "--image", str(image), "--raw"]) != 0
    assert main(["generate", "Which colour?", "--image", str(tmp_path / "no.png")]) != 0
    assert "no.png" in capsys.readouterr().err
