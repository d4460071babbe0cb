"""Wheel: the build backend of the project (PEP 517), which is setuptools' with compiled kernels.

A wheel has the kernels of all levels of its platform, and needs no compiler where it is installed. They are
compiled by zig (the package ziglang), which makes libraries for an old libc and for other platforms, too:

    python -m build                                     # an sdist, and a wheel for this machine's platform
    python -m build --wheel -C platform=linux-aarch64   # or for another of aioinfer.native.levels.PLATFORMS
    pip install . -C levels=avx512-bf16,avx2            # with these alone

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
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
    best,
    digest,
    here,
)
from aioinfer.native.processor import choose_tiles

__all__ = [
    "build_editable", "build_sdist", "build_wheel", "get_requires_for_build_editable",
    "get_requires_for_build_sdist", "get_requires_for_build_wheel", "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]  # fmt: skip

_Settings: TypeAlias = Mapping[str, Any] | None
_ZIG = "ziglang>=0.17,<0.18"


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    return [
        *build_meta.get_requires_for_build_wheel(config_settings),
        *([_ZIG] if _platform(config_settings) else []),
    ]


def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    missing = here() is not None and not _compiler()
    return [*build_meta.get_requires_for_build_editable(config_settings), *([_ZIG] if missing else [])]


def build_sdist(sdist_directory: str, config_settings: _Settings = None) -> str:
    _clear()
    name: str = build_meta.build_sdist(sdist_directory, config_settings)
    return name


def build_wheel(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    platform = _platform(config_settings)
    _clear()
    settings = None
    if platform is not None:
        _compile(platform, _levels(platform, config_settings))
        settings = {"--build-option": f"--plat-name={platform.tag}"}
    name: str = build_meta.build_wheel(wheel_directory, settings, metadata_directory)
    if platform != here():
        _clear()
    return name


def build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    platform, level = here(), best(choose_tiles())
    if platform and level and not _compiler():
        _clear()
        _compile(platform, [level])
    name: str = build_meta.build_editable(wheel_directory, config_settings, metadata_directory)
    return name


def _platform(settings: _Settings) -> Platform | None:
    """Raises ValueError for one that there are no kernels for, if it is asked for."""
    asked = (settings or {}).get("platform")
    if asked is None:
        return here()
    if asked not in PLATFORMS:
        raise ValueError(f"platform={asked}: there are kernels for {', '.join(PLATFORMS)}")
    return PLATFORMS[asked]


def _levels(platform: Platform, settings: _Settings) -> list[Level]:
    """Raises ValueError for a name that is no level of the platform."""
    named = {level.name: level for level in platform.levels}
    asked = str((settings or {}).get("levels", ",".join(named))).split(",")
    if not named.keys() >= set(asked):
        raise ValueError(f"levels={','.join(asked)}: there are {', '.join(named)}")
    return [named[name] for name in asked]


def _compiler() -> bool:
    """Whether there is one that is not zig's."""
    try:
        return "ziglang" not in find_compiler()
    except BuildFailed:
        return False


def _clear() -> None:
    """Remove libraries of the tree, and what setuptools has kept of former builds and would pack again."""
    for path in (SHIPPED, Path("build", "lib")):
        shutil.rmtree(path, ignore_errors=True)


def _compile(platform: Platform, levels: Iterable[Level]) -> None:
    SHIPPED.mkdir(exist_ok=True)
    sources = digest()
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(os.cpu_count()) as pool:
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
            links.append(["-shared", "-s", *names, *hidden, "-o", str(level.file(sources))])
        for commands in (compiles, links):
            list(pool.map(partial(_zig, platform), commands))


def _zig(platform: Platform, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "ziglang", "c++", "-target", platform.target, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
