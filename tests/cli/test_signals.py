"""Signals while a command loads: it ends with the status that a shell gives it, and one line."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from aioinfer.cli.main import main
from aioinfer.engine import Engine


@pytest.mark.parametrize("command", ["generate x", "serve --port 0", "replica --socket s"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads_ends_the_command(
    command: str,
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    left: list[str] = []

    async def start(self: Engine, progress: Any = None) -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            left.append("start")

    monkeypatch.setattr(Engine, "start", start)
    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert main(command.split()) == 128 + number
    assert left == ["start"]
    assert capsys.readouterr().err == f"aioinfer: interrupted by {number.name}\n"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert not [*tmp_path.iterdir()]


def test_a_signal_during_a_generation_closes_the_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    closed: list[bool] = []
    real = Engine.aclose

    async def aclose(self: Engine, **options: Any) -> None:
        await real(self, **options)
        closed.append(not options.get("drain", False))

    generate = Engine.generate

    def interrupted(self: Engine, *arguments: Any, **options: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return generate(self, *arguments, **options)

    monkeypatch.setattr(Engine, "aclose", aclose)
    monkeypatch.setattr(Engine, "generate", interrupted)
    assert main(["generate", "hello", "--threads", "1"]) == 143
    assert closed == [True]
    assert capsys.readouterr().err.endswith("aioinfer: interrupted by SIGTERM\n")
