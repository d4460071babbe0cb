"""Environments of the clients: where they are, and how to make them.

``python -m tests.server.programs.environments`` makes them with pip and npm, in the cache or in the directory
``AIOINFER_CLIENTS``; with names behind it (``agents``, ``npm`` ...) those only. They take 8 GB, most of it is
the ``torch`` of guidellm. Versions are pinned in ``requirements/`` and ``package.json`` beside this file.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

__all__ = ["NONE", "NPM", "directory", "node_module", "python_with"]

_HERE = Path(__file__).parent
#: files of requirements: clients that pin each other's dependencies need environments of their own
_PYTHONS = tuple(sorted(file.stem for file in (_HERE / "requirements").glob("*.txt")))
NPM = "npm"
#: why a client's test is skipped
NONE = "{} is not installed: run `python -m tests.server.programs.environments`"


def directory() -> Path:
    """Where the environments are."""
    cached = Path(os.environ.get("AIOINFER_CACHE") or Path.home() / ".cache" / "aioinfer") / "clients"
    return Path(os.environ.get("AIOINFER_CLIENTS") or cached)


@cache
def python_with(library: str) -> str | None:
    """The Python of an environment that has this library."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({library!r}) is None)"
    for python in (str(directory() / name / "bin" / "python") for name in _PYTHONS):
        if os.access(python, os.X_OK) and subprocess.run([python, "-c", code], check=False).returncode == 0:
            return python
    return None


def node_module(path: str) -> Path | None:
    """The file or folder at this path of ``node_modules``."""
    found = directory() / NPM / "node_modules" / path
    return found if found.exists() else None


def _make_python(name: str) -> None:
    environment = directory() / name
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    requirements = _HERE / "requirements" / f"{name}.txt"
    subprocess.run([environment / "bin" / "pip", "install", "-q", "-r", requirements], check=True)


def _make_npm() -> None:
    project = directory() / NPM
    project.mkdir(parents=True, exist_ok=True)
    shutil.copy(_HERE / "package.json", project)
    command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock"]
    subprocess.run(command, cwd=project, check=True)


if __name__ == "__main__":
    for each in sys.argv[1:] or (*_PYTHONS, NPM):
        print(f"{directory() / each}", flush=True)
        if each == NPM:
            _make_npm()
        else:
            _make_python(each)
