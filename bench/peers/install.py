"""Virtual environments of the peers, from pinned packages; each is checked by importing what it is for."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.peers.registry import ROOT, TORCH, Environment, python_of

__all__ = ["add_place", "install", "installed"]

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


def add_place(parser: argparse.ArgumentParser) -> None:
    """Add ``--place``, for every command that looks for peers or makes models."""
    default = Path(os.environ.get("AIOINFER_PEERS") or ROOT / ".peers")
    parser.add_argument(
        "--place", type=lambda text: Path(text).resolve(), default=default.resolve(), metavar="DIR",
        help="where environments and models are; default: $AIOINFER_PEERS, or .peers in the repository",
    )  # fmt: skip


def installed(name: str, place: Path) -> str | None:
    """Versions of what an environment was made for; None if it is not there, or was not finished."""
    try:
        return " ".join((place / name / _MARK).read_text().split())
    except OSError:
        return None


def install(environment: Environment, place: Path, arguments: Sequence[str] = ()) -> None:
    """Make a virtual environment, or bring it up to the pins. ``arguments`` are more of ``pip install``'s,
    such
    as the ``--extra-index-url`` of a CPU build of torch. Raises RuntimeError with the end of pip's output.
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
