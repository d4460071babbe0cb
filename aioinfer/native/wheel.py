"""Wheel: the build backend of the project (PEP 517), which is setuptools' with compiled kernels.

A wheel has the kernels of all levels of its platform, and needs no compiler where it is installed. They are
compiled by zig (the package ziglang), which makes libraries for an old libc and for other platforms, too:

    python -m build                                     # an sdist, and a wheel for this machine's platform
    python -m build --wheel -C platform=linux-aarch64   # or for another of aioinfer.native.levels.PLATFORMS
    pip install . -C levels=avx512-bf16,avx2            # with these alone
    python -m build --wheel -C platform=any             # without kernels, and without zig

An editable installation compiles kernels when an engine first starts; only where there is no compiler is this
machine's level compiled by zig at once. A wheel that is made on another platform has no kernels, and may be
installed anywhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from setuptools import build_meta
from setuptools.build_meta import (
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

from aioinfer.native.build import BuildFailed, find_compiler
from aioinfer.native.levels import (
    FLAGS,
    OBJECTS,
    PLATFORMS,
    SHIPPED,
    SOURCE,
    Level,
    Platform,
    digest,
    fitting,
    here,
)
from aioinfer.native.processor import choose_tiles
from aioinfer.native.turns import turn
from aioinfer.system.cores import usable_cores

__all__ = [
    "build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable",
    "get_requires_for_build_sdist", "get_requires_for_build_wheel", "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]  # fmt: skip

_Settings: TypeAlias = Mapping[str, Any] | None
_ZIG = "ziglang>=0.17,<0.18"
#: each takes up to half a gigabyte
_MOST_COMPILERS = 4
_QUIET: dict[str, Any] = {"capture_output": True, "text": True}


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    return [
        *build_meta.get_requires_for_build_wheel(config_settings),
        *([_ZIG] if _platform(config_settings) else []),
    ]


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    missing = here() is not None and not _compiler()
    return [*build_meta.get_requires_for_build_editable(config_settings), *([_ZIG] if missing else [])]


def build_sdist(sdist_directory: str, config_settings: _Settings = None) -> str:
    with _own_folder(keep=False):
        name: str = build_meta.build_sdist(sdist_directory, config_settings)
    return name


def build_wheel(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    platform = _platform(config_settings)
    settings = dict(config_settings or {})
    with _own_folder(keep=platform is not None and platform == here()):
        if platform is not None:
            _compile(platform, _levels(platform, config_settings))
            settings["--build-option"] = f"--plat-name={platform.tag}"
        name: str = build_meta.build_wheel(wheel_directory, settings, metadata_directory)
    return name


def build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    platform = here()
    if platform is not None and not _compiler() and (levels := fitting(choose_tiles())):
        with _own_folder(keep=True):
            _compile(platform, levels[:1])
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    return name


def _platform(settings: _Settings) -> Platform | None:
    """None: a wheel without kernels. Raises ValueError for one that there are no kernels for, if it is asked
    for."""
    asked = (settings or {}).get("platform")
    if asked is None:
        return here()
    if asked not in (*PLATFORMS, "any"):
        raise ValueError(f"platform={asked}: there are kernels for {', '.join(PLATFORMS)}")
    return PLATFORMS.get(asked)


def _levels(platform: Platform, settings: _Settings) -> list[Level]:
    """Raises ValueError for a name that is no level of the platform."""
    named = {level.name: level for level in platform.levels}
    asked = str((settings or {}).get("levels", ",".join(named))).split(",")
    if not named.keys() >= set(asked):
        raise ValueError(f"levels={','.join(asked)}: there are {', '.join(named)}")
    return [named[name] for name in asked]


def _compiler() -> bool:
    """Whether there is one that is not zig's and understands the sources: a Mac has a command of this name
    that only asks for an installation."""
    try:
        command = find_compiler()
    except BuildFailed:
        return False
    test = [*command, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    said = subprocess.run(test, input="#include <bit>\nstatic_assert(std::has_single_bit(4u));", **_QUIET)
    return "ziglang" not in command and said.returncode == 0


@contextmanager
def _own_folder(*, keep: bool) -> Iterator[None]:
    """No libraries but those of one build. ``keep``: they are this machine's, and stay; else what was there
    before comes back."""
    with turn(Path("build", "kernels.lock")), tempfile.TemporaryDirectory(dir="build") as place:
        before = Path(place) / "before"
        if SHIPPED.exists():
            SHIPPED.rename(before)
        # Setuptools would pack again what former builds have left there.
        shutil.rmtree(Path("build", "lib"), ignore_errors=True)
        done = False
        try:
            yield
            done = True
        finally:
            if not (keep and done):
                shutil.rmtree(SHIPPED, ignore_errors=True)
                if before.exists():
                    before.rename(SHIPPED)


def _compile(platform: Platform, levels: Iterable[Level]) -> None:
    SHIPPED.mkdir(exist_ok=True)
    sources, workers = digest(), min(_MOST_COMPILERS, usable_cores())
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(workers) as pool:
        # Zig keeps what it has compiled, of a user without a home for this build.
        homeless = not {"HOME", "XDG_CACHE_HOME"} & os.environ.keys()
        environment = {**os.environ, **({"ZIG_GLOBAL_CACHE_DIR": place} if homeless else {})}
        # A name that is not hidden could be found in torch first, which has another library of C++.
        exported = Path(place) / "exported"
        exported.write_text("{ global: aioinfer_*; local: *; };\n")
        hidden = [] if "macos" in platform.target else [f"-Wl,--version-script={exported}"]
        compiles, links = list[list[str]](), list[list[str]]()
        for level in levels:
            names = [f"{place}/{level.name}-{at}.o" for at in range(len(OBJECTS))]
            for (source, further), name in zip(OBJECTS, names, strict=True):
                compiles.append(
                    [*FLAGS, "-g0", *level.flags, *further, "-c", str(SOURCE / source), "-o", name]
                )
            # For any processor: zig compiles its own library once for each.
            links.append(["-shared", "-s", *names, *hidden, "-o", str(platform.file(level, sources))])
        for commands in (compiles, links):
            list(pool.map(partial(_zig, platform, environment), commands))


def _zig(platform: Platform, environment: Mapping[str, str], arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ziglang", "c++", "-target", platform.target, *arguments]
    done = subprocess.run(command, env=environment, **_QUIET)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
