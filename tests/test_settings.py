"""Config values from files, from variables and from keywords, in their order, and what is wrong with them."""

from __future__ import annotations

import dataclasses
import errno
import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from aioinfer import EngineConfig, ServerConfig
from aioinfer.cli.main import main
from aioinfer.config import ReplicaConfig
from aioinfer.errors import ConfigError
from tests.tiers import SECONDS, rest


def write(tmp_path: Path, content: str | bytes) -> Path:
    file = tmp_path / "settings.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return file


def test_keywords_win_over_variables_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = write(tmp_path, "chunk_size: 9\npage_size: 32\noverlap_steps: 0\nport: 81\n")
    environ = {"AIOINFER_OVERLAP_STEPS": "2", "AIOINFER_CHUNK_SIZE": "7", "AIOINFER_PORT": "82"}
    config = EngineConfig.load(file, environ, chunk_size=5)
    assert (config.chunk_size, config.overlap_steps, config.page_size, config.policy) == (5, 2, 32, "fcfs")
    assert ServerConfig.load(str(file), environ).port == 82
    assert ServerConfig.load(file, {}).port == 81
    assert EngineConfig.load(environ={}) == EngineConfig()


def test_the_variables_are_those_of_the_process_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOINFER_PAGE_SIZE", "8")
    assert EngineConfig.load().page_size == 8
    assert EngineConfig.load(environ={}).page_size is None


def test_a_keyword_that_is_no_field_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="EngineConfig has no field port"):
        EngineConfig.load(environ={}, port=1)


def test_a_value_of_a_variable_is_refused_by_both_names() -> None:
    with pytest.raises(ConfigError, match=r"^page_size must be a number.*AIOINFER_PAGE_SIZE"):
        EngineConfig.load(environ={"AIOINFER_PAGE_SIZE": "x" * 9000})


def test_a_misspelt_variable_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "aioinfer"):
        EngineConfig.load(environ={"AIOINFER_CHUNKSIZE": "1", "AIOINFER_SERVICE_HOST": "x", "PATH": "/"})
    (record,) = caplog.records
    assert "AIOINFER_CHUNKSIZE" in record.getMessage()
    assert "did you mean AIOINFER_CHUNK_SIZE?" in record.getMessage()


@pytest.mark.parametrize("name", ["CHUNKSIZE", "MAX_BODYMIB", "REPLICATOKEN", "DRAIN_TIMEOUTS"])
def test_a_command_with_several_configs_warns_of_a_variable_once(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    environ = {f"AIOINFER_{name}": "1"}
    for kind in (EngineConfig, ServerConfig):
        kind.load(environ=environ)
    ReplicaConfig.load(environ=environ, socket="s")
    assert [f"AIOINFER_{name} " in record.getMessage() for record in caplog.records] == [True]


BAD: dict[str, tuple[str | bytes, str]] = {
    "not UTF-8": (b"model: \xff\xfe\n", "is not UTF-8: byte 7 is 0xff"),
    "UTF-16": ("model: x\n".encode("utf-16"), "is not UTF-8"),
    "deep": ("a: " + "[" * 100_000, "is nested too deeply"),
    "huge": ("# " + "x" * (1 << 20), "is larger than 1 MiB"),
    "duplicate": ("page_size: 8\nchunk_size: 9\npage_size: 16\n", "line 3: page_size occurs twice"),
    "no YAML": ("model: [1, 2\n", "line 2"),
    "a tab": ("model:\n\tx: 1\n", "line 2"),
    "a tag": ("model: !!python/object/apply:os.system [ls]\n", "line 1"),
    "a date": ("model: 2001-99-99\n", "month must be in"),
    "a list": ("- model\n", "must hold a mapping of settings, not list"),
    "a text": ("model\n", "must hold a mapping of settings, not str"),
    "unknown": ("max_runing_requests: 3\n", "max_runing_requests (did you mean max_running_requests?)"),
    "dashes": ("max-running-requests: 3\n", "did you mean max_running_requests?"),
    "no name": ("1: 2\n", "unknown settings: 1"),
    "a list as key": ("[1]: 2\n", "line 1"),
    "NUL": ("model: \0\n", "special characters are not allowed"),
    "an empty model": ("model: ''\n", "model must name a model"),
    "a wrong type": ("page_size: [" + "1, " * 5000 + "1]\n", "page_size must be one of int"),
    "a huge number": ("page_size: 1" + "0" * 4000 + "\n", "page_size must be in"),
}


@rest(SECONDS)
@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_one_clear_line_and_status_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = BAD[case]
    file = write(tmp_path, content)
    if case != "a huge number":
        with pytest.raises(ConfigError) as caught:
            EngineConfig.load(file, {})
        assert message in str(caught.value)
    assert main(["generate", "x", "--config", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1
    assert len(captured.err) < 500
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("case", ["missing", "directory", "forbidden"])
def test_a_file_that_cannot_be_read_is_named(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "settings.yaml"
    if case == "directory":
        file.mkdir()
    elif case == "forbidden":
        # A mode of 0 would not do: root may read everything.
        error = PermissionError(errno.EACCES, "Permission denied", str(file))
        for name in ("open", "read_text", "read_bytes"):
            monkeypatch.setattr(Path, name, Mock(side_effect=error))
    with pytest.raises(ConfigError, match=r"settings\.yaml"):
        EngineConfig.load(file, {})


def test_aliases_that_multiply_are_refused_at_bounded_length(tmp_path: Path) -> None:
    levels = ["a0: &a0 [x, x]"]
    levels += [f"a{at}: &a{at} [*a{at - 1}, *a{at - 1}, *a{at - 1}, *a{at - 1}]" for at in range(1, 40)]
    with pytest.raises(ConfigError, match="unknown settings") as caught:
        EngineConfig.load(write(tmp_path, "\n".join(levels)), {})
    assert len(str(caught.value)) < 1000
    nested = "\n".join(["model: &a0 [x, x]", "dtype: &a1 [*a0, *a0]"])
    with pytest.raises(ConfigError, match=r"^(dtype|model) must be"):
        EngineConfig.load(write(tmp_path, nested), {})


@pytest.mark.parametrize("model", ["", "  ", "a\0b"])
def test_a_model_needs_a_name(model: str) -> None:
    with pytest.raises(ConfigError, match=r"^model must name"):
        EngineConfig(model=model)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert EngineConfig.load(write(tmp_path, "# nothing\n"), {}) == EngineConfig()


@pytest.mark.parametrize("value", [-1, 0, 10**30, 1.5, "x", [], {}, float("nan"), float("inf"), True])
@pytest.mark.parametrize("cls", [EngineConfig, ServerConfig])
def test_no_value_of_any_field_raises_anything_but_a_config_error(cls: Any, value: Any) -> None:
    for item in dataclasses.fields(cls):
        try:
            cls(**{item.name: value})
        except ConfigError as error:
            assert str(error).startswith((item.name, "host", "max_step_tokens")), error
