"""Scripts that stand in for compilers, and the files that they leave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from aioinfer.native import bindings, levels
from aioinfer.native.build import cache_directory

__all__ = ["WORKS", "Compiler", "alive", "calls", "compiler", "left", "unsettled", "unshipped"]

Compiler = Callable[[str], Path]
#: writes what it is asked for, and a line into a log of its calls
WORKS = """
[ "$1" = --version ] && echo "fake 1" && exit
echo "$@" >> "$(dirname "$0")/calls"
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Make a script the compiler, with a cache of its own."""
    monkeypatch.setenv("AIOINFER_CACHE", str(tmp_path / "cache"))

    def install(script: str) -> Path:
        path = tmp_path / "c++"
        path.write_text(f"#!/bin/sh{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("AIOINFER_CXX", str(path))
        return path

    return install


@pytest.fixture
def unsettled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not tried to load kernels."""
    monkeypatch.setattr(bindings, "_loaded", None)


@pytest.fixture
def unshipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package without compiled kernels, also in a clone that was installed without a compiler."""
    monkeypatch.setattr(levels, "SHIPPED", tmp_path / "shipped")


def calls(path: Path) -> int:
    return len((path.parent / "calls").read_text().splitlines())


def alive(process: int) -> bool:
    """Zombies are not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def left() -> list[str]:
    return sorted(file.suffix for file in cache_directory().iterdir())
