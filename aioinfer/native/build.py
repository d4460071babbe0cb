"""Build: the C++ sources to a shared library in the user's cache, where the package has none that fits.

Only a C++20 compiler is needed: the sources include no headers of Python or torch, so the library compiles
quickly and works with every version of both. It is compiled for the processor at hand. Its name has hashes

- of sources, flags and processor, and of the compiler: where one of them is another, so is the library, and
  the old one stays, until it was not used for long. Where none can be made, the library of any compiler will
  do.
- of its content: a file that was damaged is recognised before it is loaded, which would end the process, and
  compiled again.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

from aioinfer.native.levels import FLAGS, OBJECTS, SOURCE, shipped, unfit
from aioinfer.native.processor import MODELLED, Tiles, choose_tiles, instruction_sets
from aioinfer.native.trust import NotTrusted, check_folder, make_folder, open_trusted
from aioinfer.native.turns import turn

__all__ = ["UNITS", "BuildFailed", "build", "cache_directory", "find_compiler"]

#: ``progress(done, total)``, in files
_Progress: TypeAlias = Callable[[int, int], None] | None

#: how its files in the cache begin
_NAME = "kernels"
#: number of files that are compiled
UNITS = len(OBJECTS)
#: compilers for ARM, among them Apple's, know the processor by the other name
_NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
#: time limit of a compiler, in seconds
_PATIENCE = 600.0
#: seconds between two calls of ``progress`` while compilers run
_PULSE = 0.1
#: directories in the cache where compilers write
_WORKPLACE = "compiling-"
#: seconds after which such a directory is one that a killed process has left
_STALE = 3600.0
#: libraries that are kept however old, and seconds without use after which the others are removed
_KEPT = 4
_UNUSED = 30 * 86400.0
#: the interpreter is about to exit
_leaving = False
#: ends its process group when what it reads ends, with the process at the other end
_WATCHER = "import os, signal; os.read(0, 1); os.killpg(0, signal.SIGKILL)"
_log = logging.getLogger("aioinfer")


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


def build(progress: _Progress = None, tiles: Tiles | None = None) -> Path:
    """Return the library for this machine: that of the package for the processor's level, if it has one and
    neither AIOINFER_CXX nor AIOINFER_CXXFLAGS is set. Compiling one takes half a minute of processor time.

    Of several processes one compiles and the others wait; none of them sees half a file. The compiler is
    AIOINFER_CXX, or the first of ``$CXX``, ``c++``, ``g++``, ``clang++`` and that of the package ziglang (the
    extra "compiler"). AIOINFER_CXXFLAGS replaces the flags for the processor at hand; for AIOINFER_TILES see
    :func:`~aioinfer.native.processor.choose_tiles`.

    Args:
        progress: called with the number of files compiled so far and their total, and again every tenth of a
            second. Its exceptions end the compilers and are raised here; no files remain.
        tiles: those that the kernels compute with; None: what :func:`choose_tiles` says.

    Raises:
        BuildFailed: there is no compiler, or it fails.
    """
    try:
        tiles = tiles or choose_tiles()
    except ValueError as error:
        raise BuildFailed(str(error)) from error
    own, asked = os.environ.get("AIOINFER_CXXFLAGS"), os.environ.get("AIOINFER_CXX")
    found = None if own or asked or tiles == MODELLED else shipped(tiles)
    if found is not None:
        return found
    try:
        return _library([*FLAGS, *(own or _NATIVE).split(), *tiles.flags], progress)
    except BuildFailed as error:
        raise BuildFailed(f"{error}{unfit(tiles)}") from error


def _library(flags: list[str], progress: _Progress) -> Path:
    directory = cache_directory()
    # Everything but the compiler. Flags that name a processor make the same library on all machines.
    machine = instruction_sets() if any("native" in flag for flag in flags) else ""
    name = f"{_NAME}-{_hash(*flags, platform.machine(), machine, *_sources(SOURCE))}"
    try:
        with suppress(FileNotFoundError):
            check_folder(directory)
        try:
            return _of_compiler(directory, name, flags, progress)
        except BuildFailed:
            # No compiler, or one that fails, or nothing can be written: in an image, say, that was built
            # with another compiler.
            found = _intact(directory, f"{name}-*")
            if found is None:
                raise
            return found
    except NotTrusted as error:
        raise BuildFailed(str(error)) from error
    except OSError as error:
        raise BuildFailed(f"{directory} cannot be read or written: {error}") from error


def _of_compiler(directory: Path, name: str, flags: list[str], progress: _Progress) -> Path:
    """The library of this machine's compiler. Raises BuildFailed, and NotTrusted."""
    compiler = find_compiler()
    with suppress(OSError):
        make_folder(directory)  # zig writes there even to say its version
    name = f"{name}-{_hash(_version(compiler, directory))}"
    found = _intact(directory, f"{name}-*")
    if found is not None:
        return found
    try:
        make_folder(directory)
        with turn(directory / f"{_NAME}.lock", progress and partial(progress, 0, UNITS)):
            found = _intact(directory, f"{name}-*")
            if found is None:
                _prune(directory)
                with tempfile.TemporaryDirectory(
                    prefix=_WORKPLACE, dir=directory, ignore_cleanup_errors=True
                ) as place:
                    made = _compile([*compiler, *flags], Path(place), progress)
                    found = _publish(made, directory, name)
            return found
    except NotTrusted:
        raise
    except OSError as error:
        raise BuildFailed(f"{directory} cannot be written: {error}") from error


def _intact(directory: Path, pattern: str) -> Path | None:
    """A library of this name whose content has the hash in its name. Removes damaged ones, and uses none that
    others could have written."""
    for path in sorted(directory.glob(f"{pattern}.so")):
        try:
            with suppress(OSError):  # of root, or in a file system for reading only
                os.utime(path)  # the time of its last use, see _prune; first, so that it is not removed now
            with open(open_trusted(path), "rb") as file:
                content = file.read()
        except NotTrusted as error:
            _log.warning("compiled kernels are not used: %s", error)
            continue
        except OSError:
            continue
        if path.stem.rpartition("-")[2] == _hash(content):
            return path
        with suppress(OSError):  # a cache that cannot be written keeps it
            path.unlink()
    return None


def _publish(made: Path, directory: Path, name: str) -> Path:
    """Move a library to its place, whole or not at all, also if the system stops."""
    path = directory / f"{name}-{_hash(made.read_bytes())}.so"
    made.chmod(0o755)  # whatever the umask: see trust
    _sync(made)
    os.replace(made, path)
    _sync(directory)
    return path


def _prune(directory: Path) -> None:
    """Remove libraries that no start has looked up for long, except the newest few, and directories of
    compilers that were killed.

    Several processes may do so at once. A process that has loaded one keeps it: the file goes when it ends.
    """
    now = time.time()
    for place in directory.glob(f"{_WORKPLACE}*"):
        with suppress(OSError):
            if now - place.stat().st_mtime > _STALE:
                shutil.rmtree(place)
    used: list[tuple[float, Path]] = []
    for path in directory.glob(f"{_NAME}-*.so"):
        with suppress(OSError):
            used.append((path.stat().st_mtime, path))
    # One more is about to be made.
    for last, path in sorted(used, reverse=True)[_KEPT - 1 :]:
        if now - last > _UNUSED:
            with suppress(OSError):
                path.unlink()


def _sync(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


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
    raise BuildFailed(
        "there is no C++ compiler (c++, g++, clang++, nor the package ziglang); "
        "pip install 'aioinfer[compiler]' brings one"
    )


def _hash(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:16]


def _sources(directory: Path) -> Iterator[str | bytes]:
    for file in sorted(directory.iterdir()):
        yield from (file.name, file.read_bytes())


def _environment(directory: Path) -> dict[str, str]:
    """Of compilers, some of which keep files in the user's cache: in ours, nothing else may be writable."""
    return {**os.environ, "XDG_CACHE_HOME": str(directory)}


def _version(compiler: list[str], directory: Path) -> str:
    command, env = [*compiler, "--version"], _environment(directory)
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildFailed(f"{' '.join(compiler)} does not run: {error}") from error


def _compile(command: list[str], directory: Path, progress: _Progress) -> Path:
    """Compile all units in parallel, then link them."""
    objects = [str(directory / f"{at}.o") for at in range(UNITS)]
    library = directory / "library.so"
    with _Compilers(directory, progress) as compilers:
        for (source, further), target in zip(OBJECTS, objects, strict=True):
            compilers.start(*command, *further, "-c", str(SOURCE / source), "-o", target)
        # In order, the smallest unit last: the count is complete when all have finished.
        compilers.finish()
        compilers.start(*command, "-shared", *objects, "-o", str(library))
        compilers.finish()
    return library


class _Compilers:
    """Processes that end with the block, however it is left, and with this process, however it ends.

    They are one process group, which a further process watches: a signal at the death of the parent would
    reach the command of a compiler, not the processes that it starts.
    """

    def __init__(self, directory: Path, progress: _Progress) -> None:
        """``directory``: where they keep temporary files, in the cache."""
        self._progress = progress or (lambda done, total: None)
        self._environ = {**_environment(directory.parent), "TMPDIR": str(directory)}
        self._running: list[subprocess.Popen[str]] = []
        self._finished = 0

    def __enter__(self) -> _Compilers:
        """Raises OSError."""
        reading, self._living = os.pipe()
        try:
            self._watcher = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _WATCHER],
                stdin=reading,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
        except OSError:
            os.close(self._living)
            raise
        finally:
            os.close(reading)
        atexit.register(self._leave)
        return self

    def __exit__(self, *error: object) -> None:
        atexit.unregister(self._leave)
        self._kill()
        self._watcher.wait()
        os.close(self._living)
        for process in self._running:
            with process:
                pass

    def start(self, *command: str) -> None:
        """Raises BuildFailed."""
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                env=self._environ,
                process_group=self._watcher.pid,
            )
        except OSError as error:
            raise BuildFailed(f"{command[0]} does not run: {error}") from error
        self._running.append(process)

    def finish(self) -> None:
        """Wait for all. Raises BuildFailed, and what ``progress`` raises."""
        for process in self._running[self._finished :]:
            self._tell()
            said = self._wait(process)
            if process.returncode:
                first = next((line for line in said.splitlines() if "error" in line), said.strip()[:300])
                raise BuildFailed(f"the compiler failed: {first}")
            self._finished += 1
        self._tell()

    def _tell(self) -> None:
        self._progress(min(self._finished, UNITS), UNITS)

    def _wait(self, process: subprocess.Popen[str]) -> str:
        """The text that it wrote to stderr."""
        end = time.monotonic() + _PATIENCE
        while True:
            try:
                said = process.communicate(timeout=_PULSE)[1]
                break
            except subprocess.TimeoutExpired as error:
                if time.monotonic() > end:
                    raise BuildFailed(f"the compiler did not end within {_PATIENCE:g} seconds") from error
                self._tell()
        if _leaving:
            raise SystemExit
        return said

    def _kill(self) -> None:
        """End the group. Its number is the watcher's, and nobody else's until that one is waited for."""
        with suppress(ProcessLookupError):
            os.killpg(self._watcher.pid, signal.SIGKILL)

    def _leave(self) -> None:
        """The interpreter exits while a thread waits for compilers: end them, and then the thread."""
        global _leaving
        _leaving = True
        self._kill()
