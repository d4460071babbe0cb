"""A root for ARM with Python and torch, to run under qemu's user mode.

Python comes from Debian's packages for arm64, as apt finds them, and the others from the index of Python
packages: torch's newest wheel for ARM that needs no CUDA. Nothing is installed; the folder is all there is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.native.emulation import ARM, emulator, zig

__all__ = ["ArmRoot"]

_REPOSITORY = Path(__file__).parents[2]
_TORCH = ["torch==2.10.0", "sympy", "networkx", "fsspec"]
_DEBIAN = ["python3", "libgomp1", "libstdc++6"]
_PLATFORM = "aarch64-manylinux_2_28"
_APT = """APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
Dir::State::lists "{place}/lists";
Dir::State::status "{place}/status";
Dir::Cache "{place}/cache";
Debug::NoLocking "true";
"""


class ArmRoot:
    """Commands in the root, on kernels for one level; skips a test where something cannot be had."""

    def __init__(self, place: Path, level: str) -> None:
        self._root, self._site, own = place / "root", place / "site", place / "own"
        self._env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            "PYTHONPATH": os.pathsep.join(map(str, (own, _REPOSITORY, self._site))),
            "AIOINFER_CACHE": str(place / "cache"),
            # A program of this machine: qemu leaves those to the system.
            "AIOINFER_CXX": " ".join(zig("aarch64-linux-gnu.2.28")),
            "AIOINFER_CXXFLAGS": ARM[level][0],
            "OMP_NUM_THREADS": "1",
        }
        self._emulate = [emulator(), "-cpu", ARM[level][1], "-L", str(self._root)]
        self._debian(place / "apt")
        self._packages()
        python = str(next((self._root / "usr/bin").glob("python3.[0-9]*")))
        # The system cannot run it by itself, as subprocesses of the interpreter would.
        self._python = own / "python"
        own.mkdir()
        self._python.write_text(f'#!/bin/sh\nexec {" ".join(self._emulate)} {python} "$@"\n')
        self._python.chmod(0o755)
        (own / "sitecustomize.py").write_text(f"import sys\nsys.executable = {str(self._python)!r}\n")
        # Compiled first: on a busy machine it may take longer than a build may.
        self.run("-c", "from aioinfer.native import build; build._PATIENCE = 3600; build.build()")

    def run(self, *arguments: str) -> str:
        """What the interpreter writes."""
        command = [str(self._python), *arguments]
        done = subprocess.run(command, env=self._env, cwd=_REPOSITORY, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def _debian(self, place: Path) -> None:
        for part in ("lists/partial", "cache/archives/partial"):
            (place / part).mkdir(parents=True)
        (place / "status").touch()
        (place / "apt.conf").write_text(_APT.format(place=place))
        env = {**os.environ, "APT_CONFIG": str(place / "apt.conf")}
        install = ["install", "-qq", "-y", "--download-only", "--no-install-recommends", *_DEBIAN]
        for arguments in (["update", "-qq"], install):
            _fetch(["apt-get", *arguments], env)
        for package in sorted((place / "cache/archives").glob("*.deb")):
            subprocess.run(["dpkg", "-x", str(package), str(self._root)], check=True)

    def _packages(self) -> None:
        project = tomllib.loads((_REPOSITORY / "pyproject.toml").read_text())["project"]
        own = [each for each in project["dependencies"] if not each.startswith("torch")]
        own += project["optional-dependencies"]["gguf"]
        version = next((self._root / "usr/lib").glob("python3.[0-9]*")).name.removeprefix("python")
        target = ["--target", str(self._site), "--python-platform", _PLATFORM, "--python-version", version]
        install = ["uv", "pip", "install", "-q", "--only-binary", ":all:", *target]
        _fetch([*install, "--no-deps", _TORCH[0]])
        _fetch([*install, *_TORCH[1:], *own])


def _fetch(command: Sequence[str], env: dict[str, str] | None = None) -> None:
    """Skips the test if that cannot be had here."""
    program = shutil.which(
        command[0], path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    )
    if program is None:
        pytest.skip(f"there is no {command[0]}")
    done = subprocess.run([program, *command[1:]], env=env, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{command[0]}: {(done.stderr.strip() or done.stdout).splitlines()[-1:]}")
