"""Build: the C++ sources to a shared library in the user's cache.

No more than a C++20 compiler is needed: the library knows nothing of Python's or torch's headers. That makes
it quick to compile, and one library serves every version of both. It is compiled for the very processor it
will run on, under a name made of all that it depends on: a changed source, compiler, flag or processor
makes another library beside the old one.
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
#: seconds that a compiler may take
_PATIENCE = 600
#: the interpreter ends
_leaving = False


class BuildFailed(Exception):
    """There is no library, for a reason in words."""


def cache_directory() -> Path:
    """Where compiled libraries are kept: AIOINFER_CACHE, or ``aioinfer`` in the user's cache directory.

    Raises BuildFailed for a user who has none.
    """
    own = os.environ.get("AIOINFER_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "aioinfer"
    except RuntimeError as error:
        raise BuildFailed(
            "there is no home to keep a library in, and AIOINFER_CACHE names no place"
        ) from error


def build(progress: Callable[[int, int], None] | None = None) -> Path:
    """The library for this machine, compiled if that has not been done yet; half a minute, then.

    Several processes may do so at once: the last one to finish wins, and nobody sees half a file.
    AIOINFER_CXX names another compiler than the first of ``$CXX``, ``c++``, ``g++``, ``clang++`` and that of
    the package ziglang (the extra "compiler"); AIOINFER_CXXFLAGS other flags than those for the processor at
    hand.

    Args:
        progress: called with how many of how many files have been compiled.

    Raises:
        BuildFailed: there is no compiler, or it does not succeed.
    """
    compiler = find_compiler()
    flags = [*_FLAGS, *os.environ.get("AIOINFER_CXXFLAGS", "-march=native").split()]
    path = cache_directory() / f"kernels-{_fingerprint(compiler, flags)}.so"
    if path.is_file():
        return path
    try:
        # Nobody else may put a library there.
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=path.parent) as directory:
            made = _compile(compiler, flags, Path(directory), progress)
            os.replace(made, path)
    except OSError as error:
        raise BuildFailed(f"{path.parent} cannot be written: {error}") from error
    return path


def find_compiler() -> list[str]:
    """The command of the compiler that :func:`build` takes. Raises BuildFailed if there is none."""
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
    """What instructions the processor has, where the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _compile(
    compiler: list[str], flags: list[str], directory: Path, progress: Callable[[int, int], None] | None
) -> Path:
    """All units side by side, and then together."""
    objects = [directory / f"{at}.o" for at in range(len(_UNITS))]
    running: list[subprocess.Popen[str]] = []
    leave = partial(_leave, running)
    atexit.register(leave)
    try:
        for (source, further), target in zip(_UNITS, objects, strict=True):
            running.append(
                _start(*compiler, *flags, *further, "-c", str(_SOURCE / source), "-o", str(target))
            )
        # The smallest last: whatever order they end in, the count is right when it is complete.
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
    """Those that still run, with what works for them: a compiler's command only calls the compiler."""
    for process in running:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _leave(running: list[subprocess.Popen[str]]) -> None:
    """The interpreter ends while a thread waits for compilers: neither is to go on."""
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
