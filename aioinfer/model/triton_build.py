"""Whether Triton can compile on the host: a stub of CUDA's driver, in C, before its first launch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

__all__ = ["build_unsupported"]


@cache
def build_unsupported() -> str | None:
    """Reason why Triton cannot compile its stub, in words for the user; None if it has done so.

    Without a C compiler Triton is told to use that of the package ziglang, if it is installed: see
    ``triton.knobs.build.impl``. The stub is compiled at the first call, or taken from Triton's cache.
    """
    import triton

    header = Path(_headers(), "Python.h")
    if triton.knobs.build.impl is None and not _has_compiler():
        if importlib.util.find_spec("ziglang") is None:
            found = os.environ.get("CC", "gcc, clang, nor the package ziglang")
            return f"Triton needs a C compiler, and there is no {found}"
        triton.knobs.build.impl = _build_by_zig
    if not header.is_file():
        return f"Triton needs the headers of Python, and there is no {header}"
    try:
        _load_driver()
    except Exception as error:
        # Of the compiler, the linker, or the driver itself.
        return f"Triton cannot load its driver: {' '.join(str(error).split())[:300]}"
    return None


def _has_compiler() -> bool:
    """Whether Triton finds a compiler by itself."""
    named = os.environ.get("CC")
    return any(map(shutil.which, ("gcc", "clang") if named is None else (named,)))


def _headers() -> str:
    """The directory of Python's headers, where Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    return sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]


def _load_driver() -> None:
    """Have Triton make its driver, and with it the stub."""
    from triton.runtime import driver

    driver.active.get_current_device()


def _build_by_zig(
    name: str,
    source: str,
    directory: str,
    library_dirs: Sequence[str],
    include_dirs: Sequence[str],
    libraries: Sequence[str],
) -> str:
    """Compile a module of Python's as Triton would with gcc: the path of the library. Raises RuntimeError."""
    target = os.path.join(directory, f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}")
    language = "cc" if source.endswith(".c") else "c++"
    command = [sys.executable, "-m", "ziglang", language, source, "-O3", "-shared", "-fPIC", "-o", target]
    command += [f"-I{place}" for place in (*include_dirs, directory, _headers())]
    for library in libraries:
        paths = [os.path.join(place, library) for place in library_dirs]
        # A name with a version, as "libcuda.so.1", is a file; zig's linker does not look for these.
        command.append(next(filter(os.path.isfile, paths), f"-l{library}"))
    command += [f"-L{place}" for place in library_dirs]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise RuntimeError(f"zig {language} failed: {done.stderr.strip()[:1000]}")
    return target
