"""Containers whose root is read-only: kernels from the image, or compiled in the one place for writing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from aioinfer.native.bindings import kernels
from aioinfer.native.build import build
from tests.model.harness import require
from tests.tiers import COMPILES, PROGRAM, grid, nightly, rest

_ROOT = Path(__file__).parents[2]
#: Makes all file systems read-only but those of the kernel, and "$1" if it is there, and runs the rest.
READ_ONLY = """
place=$1; shift
if [ -n "$place" ]; then mount --bind "$place" "$place" || exit 99; fi
cut -d' ' -f5 /proc/self/mountinfo | while read -r point; do
    case $point in /dev*|/proc*|/sys*|"$place") ;; *) mount -o remount,bind,ro "$point" 2>/dev/null ;; esac
done
if touch "$HOME/x" /tmp/x "$PWD/x" 2>/dev/null; then exit 98; fi
exec "$@"
"""
#: needs a place for temporary files, as g++ does; what it links was compiled before
COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo "fake 1" && exit
mktemp >/dev/null || exit 1
link=
for word; do [ "$word" = -shared ] && link=1; done
while [ "$1" != -o ]; do shift; done
if [ "$link" ]; then cp "{library}" "$2"; else : > "$2"; fi
"""
OWN = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def answer(cache: Path, writable: Path | None, **variables: str) -> str:
    """What a start says and generates there, with native kernels or not at all."""
    command = [sys.executable, "-m", "aioinfer", "generate", "What is 17 + 25?", "--threads", "1"]
    done = subprocess.run(
        [*OWN, "sh", "-c", READ_ONLY, "sh", str(writable or ""), *command, "--log-level", "info"],
        env={
            **os.environ,
            "PYTHONPATH": str(_ROOT),
            "AIOINFER_CACHE": str(cache),
            "AIOINFER_ATTENTION_BACKEND": "native",
            **variables,
        },
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode != 98, "something else can be written"
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(autouse=True)
def namespaces() -> None:
    require("native")
    if subprocess.run([*OWN, "mount", "--bind", "/tmp", "/tmp"], capture_output=True).returncode:
        pytest.skip("no namespace of mounts is permitted here")


@pytest.fixture
def library() -> Path:
    """That of this process, whatever it was compiled with."""
    path = build()
    assert path.name == kernels().name
    return path


@rest(PROGRAM)
@pytest.mark.parametrize(
    "compiler", grid([pytest.param("true", id="another compiler")], [pytest.param("", id="the same one")])
)
def test_kernels_of_the_image_are_used_where_nothing_can_be_written(
    library: Path, tmp_path: Path, compiler: str
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    shutil.copy(library, cache)
    said = answer(cache, None, **({"AIOINFER_CXX": compiler} if compiler else {}))
    assert "17 + 25 = 42" in said
    assert "layers native" in said
    assert "WARNING" not in said


@nightly(PROGRAM)
def test_kernels_are_compiled_where_only_the_cache_can_be_written(library: Path, tmp_path: Path) -> None:
    """The folder is that of a volume, which is open to everybody, and the cache is a folder in it."""
    compiler, volume = tmp_path / "c++", tmp_path / "volume"
    compiler.write_text(COMPILER.format(library=library))
    compiler.chmod(0o755)
    volume.mkdir()
    volume.chmod(0o777)
    said = answer(volume / "own", volume, AIOINFER_CXX=str(compiler))
    assert "17 + 25 = 42" in said
    assert "compiling native kernels" in said
    assert [path.suffix for path in (volume / "own").iterdir()] == [".so"]


@nightly(COMPILES)
@pytest.mark.timeout(400)
def test_a_real_compiler_needs_no_other_place(tmp_path: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    flags = {"AIOINFER_CXX": "g++", "AIOINFER_CXXFLAGS": "-march=native -O0"}
    assert "17 + 25 = 42" in answer(volume / "own", volume, **flags)
