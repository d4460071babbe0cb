"""Levels: kernels that come compiled with the package, one library for each level of instruction sets.

A wheel has all levels of its platform, compiled by :mod:`aioinfer.native.wheel`; the best one that the
processor has, and whose use the system permits, is loaded (llama.cpp calls them CPU variants). A library
counts only if it was compiled from the sources that lie beside it: a changed clone compiles its own.
"""

from __future__ import annotations

import hashlib
import platform
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from aioinfer.native.processor import PERMITTED, Tiles, instruction_sets

__all__ = [
    "FLAGS",
    "OBJECTS",
    "PLATFORMS",
    "SHIPPED",
    "SOURCE",
    "Level",
    "Platform",
    "digest",
    "fitting",
    "here",
    "origin",
    "shipped",
    "unfit",
]

SOURCE = Path(__file__).parent / "source"
#: where the package has its libraries
SHIPPED = Path(__file__).parent / "shipped"
#: of every compiler
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-fno-math-errno", "-ffp-contract=off")
#: (source, further flags) of every object
OBJECTS = (
    ("models.cpp", ("-DNUMBER=bfloat16", "-DNAME=bfloat16")),
    ("models.cpp", ("-DNUMBER=float", "-DNAME=float32")),
    ("quantised.cpp", ()),
    ("sampling.cpp", ()),
    ("common.cpp", ()),
)


@dataclass(frozen=True, slots=True)
class Level:
    """Instruction sets that one library of kernels uses."""

    name: str
    #: what the processor must have, as the system calls it
    needs: frozenset[str]
    #: of a compiler for it: clang's flags, as zig takes them
    flags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Platform:
    """What a wheel is for: an operating system with a kind of processor."""

    name: str
    #: of zig: with the oldest libc that the libraries run with
    target: str
    #: of the wheel's name
    tag: str
    #: the best first
    levels: tuple[Level, ...]

    def file(self, level: Level, sources: str) -> Path:
        """The library of a level in the package; ``sources``: their :func:`digest`."""
        return SHIPPED / f"{level.name}.{self.name}-{sources}.so"


def _level(name: str, cpu: str, *needs: Iterable[str], flags: tuple[str, ...] = ()) -> Level:
    return Level(name, frozenset().union(*needs), (f"-mcpu={cpu}", *flags))


_AVX2 = frozenset({"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
_AVX512 = _AVX2 | frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}
# Compilers would do with half of the vectors, which early processors with AVX-512 were better at.
_V4 = "x86_64_v4-prefer_256_bit"
_X86 = (
    _level(
        "amx",
        f"{_V4}+avx512vnni+avx512bf16+amx_tile+amx_bf16+amx_int8",
        _BF16,
        {"amx_tile", "amx_bf16", "amx_int8"},
        flags=PERMITTED.flags,
    ),
    _level("avx512-bf16", f"{_V4}+avx512vnni+avx512bf16", _BF16),
    _level("avx512-vnni", f"{_V4}+avx512vnni", _AVX512, {"avx512_vnni"}),
    _level("avx512", _V4, _AVX512),
    _level("avx2-vnni", "x86_64_v3+avxvnni", _AVX2, {"avx_vnni"}),
    _level("avx2", "x86_64_v3", _AVX2),
)
_DOT = frozenset({"asimd", "asimddp", "atomics"})
_ARM = (
    _level("i8mm", "generic+v8_2a+dotprod+i8mm+bf16", _DOT, {"i8mm", "bf16"}),
    _level("dotprod", "generic+v8_2a+dotprod", _DOT),
    _level("neon", "generic"),  # which every such processor has
)
_APPLE = (_ARM[0], _level("dotprod", "generic+v8_2a+dotprod"))  # so has every one of Apple's, from M1 on
_ALL = (
    Platform("linux-x86_64", "x86_64-linux-gnu.2.17", "manylinux_2_17_x86_64", _X86),
    Platform("linux-aarch64", "aarch64-linux-gnu.2.17", "manylinux_2_17_aarch64", _ARM),
    Platform("darwin-arm64", "aarch64-macos.11.0", "macosx_11_0_arm64", _APPLE),
)
#: by system and processor
PLATFORMS = {each.name: each for each in _ALL}


def here() -> Platform | None:
    """This machine's platform, if wheels are made for it."""
    return PLATFORMS.get(f"{sys.platform}-{platform.machine()}")


def fitting(tiles: Tiles) -> list[Level]:
    """The levels that this processor has, the best first. ``tiles``: whether it may use its own."""
    found, features = here(), set(instruction_sets().split())
    levels = found.levels if found else ()
    return [each for each in levels if each.needs <= features and (each.name != "amx" or tiles == PERMITTED)]


def digest() -> str:
    """A hash of the sources, and of what they are compiled with."""
    flags = [level.flags for each in PLATFORMS.values() for level in each.levels]
    found = hashlib.sha256(repr((FLAGS, OBJECTS, flags)).encode())
    for file in sorted(SOURCE.iterdir()):
        found.update(f"{file.name}\0".encode() + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def shipped(tiles: Tiles) -> Path | None:
    """The best library that the package has for this processor."""
    found, sources = here(), digest()
    paths = (found.file(level, sources) for level in fitting(tiles)) if found else ()
    return next((path for path in paths if path.exists()), None)


def origin(path: str) -> str:
    """Where a library is from, in words for the user."""
    file = Path(path)
    return (
        f"level {file.name.partition('.')[0]} of the package" if file.parent == SHIPPED else "compiled here"
    )


def unfit(tiles: Tiles) -> str:
    """What a user should know besides if there is no compiler: the processor lacks what all libraries of the
    package need. Empty if that is not so."""
    found = here()
    if found is None or fitting(tiles) or not any(SHIPPED.glob(f"*-{digest()}.so")):
        return ""
    lacking = found.levels[-1].needs - set(instruction_sets().split())
    return f"; the kernels that come with the package need {' '.join(sorted(lacking))}"
