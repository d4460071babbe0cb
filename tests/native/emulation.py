"""ARM on other machines: programs for it run by qemu's user mode, compiled by the package ziglang."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from aioinfer.native.build import find_compiler
from aioinfer.native.levels import FLAGS, PLATFORMS, SOURCE

__all__ = ["ARM", "compile_program", "emulator", "zig"]

#: level of the wheel -> (flags of zig's compiler, the processor to emulate: where qemu has it, one without
#: newer instructions)
ARM = {
    level.name: (" ".join(level.flags), "cortex-a72" if level.name == "neon" else "max")
    for level in PLATFORMS["linux-aarch64"].levels
}
_PLACE = Path(__file__).parent
#: of a program that runs the kernels; models.cpp is the templates that such a program includes
_UNITS = ("common.cpp", "quantised.cpp", "sampling.cpp")


def emulator() -> str:
    """The command that runs programs for ARM; skips a test where there is none."""
    found = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    if found is None:
        pytest.skip("there is no qemu-aarch64: the package qemu-user")
    return found


def zig(target: str) -> list[str]:
    """The compiler of the package ziglang; skips a test where it is not installed."""
    if find_spec("ziglang") is None:
        pytest.skip("the package ziglang is not installed")
    return [sys.executable, "-m", "ziglang", "c++", "-target", target]


def compile_program(name: str, command: Sequence[str], flags: Iterable[str], directory: Path) -> Path:
    """A program of this folder, with the kernels. Its units are compiled two at a time."""
    command = [*(command or find_compiler()), *FLAGS, "-g0", f"-I{SOURCE}", f"-I{_PLACE}", *flags]
    sources = [_PLACE / f"{name}.cpp", *(SOURCE / unit for unit in _UNITS)]
    objects = [str(directory / f"{source.stem}.o") for source in sources]

    def run(*arguments: str) -> None:
        subprocess.run([*command, *arguments], check=True, capture_output=True, text=True)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda source, target: run("-c", str(source), "-o", target), sources, objects))
    run(*objects, "-o", str(directory / name))
    return directory / name
