"""Virtual environments of the peers, from pinned packages; each is checked by importing what it is for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers.registry import TORCH, Environment, python_of

__all__ = ["install", "installed"]

#: written last: what was installed
_MARK = "installed.txt"
#: prints the versions that figures depend on, after imports that fail if something is missing
_PROBE = """
import {probe}
import importlib.metadata as metadata
for name in {names}:
    try:
        print(f"{{name}}=={{metadata.version(name)}}")
    except metadata.PackageNotFoundError:
        pass
"""


def installed(name: str, place: Path) -> str | None:
    """Versions of what an environment was made for; None if it is not there, or was not finished."""
    try:
        return " ".join((place / name / _MARK).read_text().split())
    except OSError:
        return None


def install(environment: Environment, place: Path, arguments: Sequence[str] = ()) -> None:
    """Make it, or bring what is there up to the pins. ``arguments`` are more of ``pip install``'s.

    A CPU build of torch is wanted: where the index offers others too, ``--extra-index-url`` or pip's
    configuration say so. Raises RuntimeError with the end of what pip said.
    """
    folder = place / environment.name
    mark = folder / _MARK
    mark.unlink(missing_ok=True)
    place.mkdir(parents=True, exist_ok=True)
    python = str(python_of(environment.name, place))
    if not Path(python).exists():
        _run([sys.executable, "-m", "venv", str(folder)])
    constraints = folder / "constraints.txt"
    constraints.write_text(f"{TORCH}\n")
    pip = [python, "-m", "pip", "install", "--no-input", "-c", str(constraints), *arguments]
    if environment.torch:
        # First, so that whatever asks for torch finds this one.
        _run([*pip, TORCH])
    _run([*pip, *environment.packages], environment.variables)
    if environment.unwanted:
        _run([python, "-m", "pip", "uninstall", "-y", *environment.unwanted])
    names = [
        "torch",
        "transformers",
        *(package.split("=")[0].split("[")[0] for package in environment.packages),
    ]
    script = _PROBE.format(probe=environment.probe, names=list(dict.fromkeys(names)))
    mark.write_text(_run([python, "-c", script]))


def _run(command: Sequence[str], variables: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        command, env={**os.environ, **(variables or {})}, stdin=subprocess.DEVNULL, text=True,
        capture_output=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command[:5])} ...: {(done.stdout + done.stderr)[-2000:]}")
    return done.stdout
