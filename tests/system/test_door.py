"""One door: what only some systems have is in the room ``system``, and native Windows is refused in words."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import aioinfer
from aioinfer.cli.main import main
from aioinfer.config import EngineConfig
from aioinfer.engine import Engine
from aioinfer.errors import ConfigError
from aioinfer.parallel import Dispatcher
from aioinfer.system import support
from aioinfer.testing import FakeEngine

PACKAGE = Path(aioinfer.__file__).parent
#: functions and files that a system may not have
SPECIAL = re.compile(
    r"\bfcntl\b|\bimport resource\b|\bsys\.platform\b|\bos\.name\b|platform\.(system|machine)|/proc/|/sys/"
    r"|\b(posix_fadvise|memfd_create|sched_\w+affinity|setpriority|sysconf|POLLRDHUP|kqueue|epoll)\b"
    r"|\bos\.O_(CLOEXEC|DIRECTORY|NOFOLLOW|NONBLOCK|PATH)\b|\b(prctl|malloc_trim|mincore|madvise)\b|CDLL\(None"
)
#: compiled kernels, which are of one system and one processor: their flags, features and files
KERNELS = {f"native/{name}.py" for name in ("bindings", "build", "levels", "processor")}


def test_no_other_room_asks_which_system_it_is() -> None:
    wrong = [
        f"{name}:{number}: {line.strip()}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if (name := path.relative_to(PACKAGE).as_posix()).partition("/")[0] != "system"
        and name not in KERNELS
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if SPECIAL.search(line)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "sys", SimpleNamespace(platform="win32"))


async def test_an_engine_refuses_native_windows_and_names_wsl(windows: None) -> None:
    engine = Engine(EngineConfig())
    with pytest.raises(ConfigError, match=r"WSL .*wsl --install"):
        await engine.start()
    async with FakeEngine(["It works."]) as fake:
        assert (await fake.generate("Does it?")).text == "It works."


async def test_engines_in_processes_refuse_it_too(windows: None) -> None:
    with pytest.raises(ConfigError, match="wsl --install"):
        await Dispatcher(processes=1, config=EngineConfig()).start()


@pytest.mark.parametrize("command", ["serve", "generate hello", "chat", "doctor", "models"])
def test_every_command_refuses_it(windows: None, capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert main(command.split()) == 2
    said = capsys.readouterr().err
    assert "wsl --install" in said
    assert said.count("\n") == 1


def test_help_is_there_on_every_system(windows: None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    assert "serve" in capsys.readouterr().out
