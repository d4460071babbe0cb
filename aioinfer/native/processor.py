"""Processor: the instruction sets of the one at hand, and whether the kernels may use its tiles (AMX).

Tiles are eight kilobytes of registers, which Linux saves only for processes that have asked for it; others
end with the first such instruction. The answer may be no: containers filter the call, and the stack that a
thread has for signals may be too small for the registers.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

from aioinfer.system import mac
from aioinfer.system.support import is_mac

__all__ = ["MODELLED", "PERMITTED", "Tiles", "choose_tiles", "instruction_sets"]

#: what the kernels need, as ``/proc/cpuinfo`` calls it
_AMX = ("amx_tile", "amx_bf16", "amx_int8")
#: of Linux on x86-64; too new for the headers and libraries of many systems
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILE_DATA = 158, 0x1023, 18


@dataclass(frozen=True, slots=True)
class Tiles:
    """Whether kernels compute with tiles, and with which."""

    #: flags of the compiler: they permit the processor's tiles, or ask for a model of them
    flags: tuple[str, ...]
    #: in words for the user; empty for processors that never have any
    reason: str


#: the processor's, if the compiler knows that it has them
PERMITTED = Tiles(("-DAIOINFER_TILES",), "the processor has AMX, and the system permits it")
#: The same in plain C++; its vectors are wider than the processor's, which g++ would remark on. It is slow
#: at any level of optimisation, so the compiler need not take minutes.
MODELLED = Tiles(("-DAIOINFER_MODELLED_TILES", "-Wno-psabi", "-O1"), "AIOINFER_TILES is model")


def instruction_sets() -> str:
    """The system's list of the processor's features, where there is one."""
    if is_mac():
        return mac.instruction_sets()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def choose_tiles() -> Tiles:
    """The processor's tiles, if it has any and the system permits them, which this process asks for.

    AIOINFER_TILES is "auto" unless it is set; "off" does without them; "model" computes the same bits in
    plain C++, very slowly, on any processor: for tests. Raises ValueError for another value.
    """
    wanted = os.environ.get("AIOINFER_TILES", "auto")
    if wanted == "model":
        return MODELLED
    if wanted not in ("auto", "off"):
        raise ValueError(f"AIOINFER_TILES is {wanted!r}, not auto, off or model")
    if platform.machine() not in ("x86_64", "AMD64"):
        return Tiles((), "")
    if not set(_AMX) <= set(instruction_sets().split()):
        return Tiles((), "the processor has no AMX")
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return Tiles((), "AMX is used on Linux for x86-64 only")
    if wanted == "off":
        return Tiles((), "the processor has AMX, and AIOINFER_TILES is off")
    refused = _ask()
    if refused:
        return Tiles((), f"the processor has AMX, and the system refuses it: {os.strerror(refused)}")
    return PERMITTED


def _ask() -> int:
    """Ask for tiles, for all threads of this process and those it forks. Returns 0, or the error's number."""
    system = ctypes.CDLL(None, use_errno=True)
    arguments = map(ctypes.c_long, (_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_TILE_DATA))
    return ctypes.get_errno() if system.syscall(*arguments) else 0
