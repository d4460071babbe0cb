"""Build: the C++ sources to a shared library in the user's cache.

Only a C++20 compiler is needed: the sources include no headers of Python or torch, so the library compiles
quickly and works with every version of both. It is compiled for the processor at hand, and its name is a hash
of everything it depends on: another source, compiler, flag or processor makes another library beside the old
one.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

__all__ = ["BuildFailed", "build", "cache_directory", "find_compiler"]

_SOURCE = Path(__file__).parent / "source"
_FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-fno-math-errno")
#: (source, further flags) of every object
_UNITS = (
    ("models.cpp", ("-DNUMBER=bfloat16", "-DNAME=bfloat16")),
    ("models.cpp", ("-DNUMBER=float", "-DNAME=float32")),
    ("sampling.cpp", ("-ffp-contract=off",)),
    ("common.cpp", ()),
)
#: time limit of a compiler, in seconds
_PATIENCE = 600
#: the interpreter is about to exit
_leaving = False


class BuildFailed(Exception):
    """There is no library; the message gives the reason."""


def cache_directory() -> Path:
    """The directory of compiled libraries: AIOINFER_CACHE, or ``aioinfer`` in the user's cache directory.

    Raises BuildFailed if the user has no home directory.
    """
    own = os.environ.get("AIOINFER_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "aioinfer"
    except RuntimeError as error:
        raise BuildFailed(
            "there is no home directory for the compiled library, and AIOINFER_CACHE is not set"
        ) from error


def build(progress: Callable[[int, int], None] | None = None) -> Path:
    """The library for this machine, compiled if that has not been done yet, which takes about half a minute.

    Several processes may compile at once: the file of the last one stays, and no process sees half a file.
    The compiler is AIOINFER_CXX, or the first of ``$CXX``, ``c++``, ``g++``, ``clang++`` and that of the
    package ziglang (the extra "compiler"). AIOINFER_CXXFLAGS replaces the flags for the processor at hand.

    Args:
        progress: called with the number of files compiled so far and their total.

    Raises:
        BuildFailed: there is no compiler, or it fails.
    """
    compiler = find_compiler()
    flags = [*_FLAGS, *os.environ.get("AIOINFER_CXXFLAGS", "-march=native").split()]
    path = cache_directory() / f"kernels-{_fingerprint(compiler, flags)}.so"
    if path.is_file():
        return path
    try:
        # Closed to other users, who could put a library there.
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = _compile(compiler, flags, Path(directory), progress)
            os.replace(made, path)
    except OSError as error:
        raise BuildFailed(f"{path.parent} cannot be written: {error}") from error
    return path


def find_compiler() -> list[str]:
    """The command of the compiler of :func:`build`. Raises BuildFailed if there is none."""
    named = os.environ.get("AIOINFER_CXX") or os.environ.get("CXX")
    for name, *arguments in [shlex.split(named)] if named else [["c++"], ["g++"], ["clang++"]]:
        found = shutil.which(name)
        if found:
            return [found, *arguments]
    if named:
        raise BuildFailed(f"there is no compiler {named}")
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++"]
    raise BuildFailed("there is no C++ compiler (c++, g++, clang++, nor the package ziglang)")


def _fingerprint(compiler: list[str], flags: list[str]) -> str:
    digest = hashlib.sha256()
    for part in (_version(compiler), *flags, platform.machine(), _processor()):
        digest.update(part.encode() + b"\0")
    for file in sorted(_SOURCE.iterdir()):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _version(compiler: list[str]) -> str:
    try:
        return subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildFailed(f"{' '.join(compiler)} does not run: {error}") from error


def _processor() -> str:
    """The instruction sets of the processor, where the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(
    compiler: list[str], flags: list[str], directory: Path, progress: Callable[[int, int], None] | None
) -> Path:
    """Compile all units in parallel, then link them."""
    objects = [directory / f"{at}.o" for at in range(len(_UNITS))]
    running: list[subprocess.Popen[str]] = []
    leave = partial(_leave, running)
    atexit.register(leave)
    try:
        for (source, further), target in zip(_UNITS, objects, strict=True):
            running.append(
                _start(*compiler, *flags, *further, "-c", str(_SOURCE / source), "-o", str(target))
            )
        # In order, the smallest unit last: the count is complete when all have finished.
        for done, process in enumerate(running):
            if progress is not None:
                progress(done, len(running))
            _finish(process)
    finally:
        atexit.unregister(leave)
        _kill(running)
        for process in running:
            with process:
                pass
    library = directory / "library.so"
    _finish(_start(*compiler, *flags, "-shared", *map(str, objects), "-o", str(library)))
    if progress is not None:
        progress(len(running), len(running))
    return library


def _start(*command: str) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(
            command,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise BuildFailed(f"{command[0]} does not run: {error}") from error


def _kill(running: list[subprocess.Popen[str]]) -> None:
    """End compilers that still run, with their process groups: the command only starts others."""
    for process in running:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _leave(running: list[subprocess.Popen[str]]) -> None:
    """The interpreter exits while a thread waits for compilers: end them, and then the thread."""
    global _leaving
    _leaving = True
    _kill(running)


def _finish(process: subprocess.Popen[str]) -> None:
    try:
        _, said = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired as error:
        raise BuildFailed(f"the compiler did not end within {_PATIENCE} seconds") from error
    if _leaving:
        raise SystemExit
    if process.returncode:
        first = next((line for line in said.splitlines() if "error" in line), said.strip()[:300])
        raise BuildFailed(f"the compiler failed: {first}")
