"""Which instructions the kernels are compiled for: by the processor, the system's permission and the user."""

from __future__ import annotations

import ctypes
import errno
import platform
import sys
from pathlib import Path
from typing import Any

import pytest

from aioinfer.cli.doctor import examine
from aioinfer.config import EngineConfig
from aioinfer.execution.torch_device import TorchDevice
from aioinfer.native import bindings, processor
from aioinfer.native.build import BuildFailed, build
from aioinfer.native.processor import MODELLED, PERMITTED, Tiles, choose_tiles
from tests.native.compilers import WORKS, Compiler

AMX = "flags\t\t: fpu avx512f amx_bf16 avx512_fp16 amx_tile amx_int8"


class System:
    """The C library of a machine, whose system answers requests for tiles with an error number, or 0."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.asked: list[tuple[int, ...]] = []

    def syscall(self, *arguments: Any) -> int:
        self.asked.append(tuple(argument.value for argument in arguments))
        ctypes.set_errno(self.answer)
        return -1 if self.answer else 0


@pytest.fixture
def system(monkeypatch: pytest.MonkeyPatch) -> System:
    """Linux on a Xeon with AMX."""
    made = System(0)
    monkeypatch.delenv("AIOINFER_TILES", raising=False)
    monkeypatch.setattr(processor, "instruction_sets", lambda: AMX)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(processor.ctypes, "CDLL", lambda name, use_errno: made)
    return made


def test_tiles_are_used_where_the_system_permits_them(system: System) -> None:
    assert choose_tiles() == PERMITTED
    assert system.asked == [(158, 0x1023, 18)]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EPERM, errno.ENOSYS, errno.EINVAL])
def test_a_refusal_is_given_as_the_reason(system: System, number: int) -> None:
    system.answer = number
    tiles = choose_tiles()
    assert tiles.flags == ()
    assert tiles.reason.startswith("the processor has AMX, and the system refuses it: ")


@pytest.mark.parametrize("missing", ["amx_tile", "amx_bf16", "amx_int8"])
def test_without_one_of_the_instruction_sets_the_system_is_not_asked(
    system: System, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    monkeypatch.setattr(processor, "instruction_sets", lambda: AMX.replace(missing, ""))
    assert choose_tiles() == Tiles((), "the processor has no AMX")
    assert system.asked == []


@pytest.mark.parametrize(("name", "value"), [("machine", "i686"), ("platform", "freebsd14")])
def test_other_systems_are_not_asked(
    system: System, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    if name == "machine":
        monkeypatch.setattr(platform, "machine", lambda: value)
    else:
        monkeypatch.setattr(sys, "platform", value)
    assert choose_tiles().flags == ()
    assert system.asked == []


def test_the_variable_decides_first(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    unused = Tiles((), "the processor has AMX, and AIOINFER_TILES is off")
    for value, wanted in (("off", unused), ("model", MODELLED)):
        monkeypatch.setenv("AIOINFER_TILES", value)
        assert choose_tiles() == wanted
    assert system.asked == []
    monkeypatch.setenv("AIOINFER_TILES", "auto")
    assert choose_tiles() == PERMITTED


def test_another_value_of_the_variable_is_the_reason_why_there_are_no_kernels(
    compiler: Compiler, unsettled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(WORKS)
    monkeypatch.setenv("AIOINFER_TILES", "on")
    with pytest.raises(BuildFailed, match="AIOINFER_TILES is 'on', not auto, off or model"):
        build()
    assert "AIOINFER_TILES is 'on'" in (bindings.native_unsupported() or "")


def test_a_path_has_a_library_of_its_own(compiler: Compiler, system: System, tmp_path: Path) -> None:
    compiler(WORKS)
    found = {build(tiles=tiles) for tiles in (Tiles((), ""), PERMITTED, MODELLED)}
    assert len(found) == 3
    assert build() == build(tiles=PERMITTED)
    system.answer = errno.EPERM
    assert build() == build(tiles=Tiles((), ""))
    assert "-DAIOINFER_MODELLED_TILES" in (tmp_path / "calls").read_text()


def test_this_processor_is_read() -> None:
    """Whatever it has."""
    assert processor.instruction_sets()
    assert choose_tiles().reason or platform.machine() in ("aarch64", "arm64")


@pytest.mark.native
def test_the_instructions_are_said_by_the_doctor_and_at_the_start() -> None:
    config = EngineConfig(device="cpu", num_pages=20, max_model_len=64)
    said = bindings.instructions()
    assert said.partition(" (")[0] in (
        "AMX tiles",
        "modelled tiles",
        "AVX-512 bf16",
        "AVX-512",
        "AVX2",
        "plain",
        "NEON i8mm bf16",
        "NEON dotprod",
        "NEON",
    )
    assert said.endswith(f"{choose_tiles().reason})")
    assert said in {finding.text for finding in examine(config) if finding.subject == "instructions"}
    device = TorchDevice(config)
    try:
        info = device.open()
    finally:
        device.close()
    assert info.kernels["instructions"] == said
    assert f"instructions {said}" in info.decisions


@pytest.mark.native
def test_a_library_that_was_compiled_without_amx_in_spite_of_the_permission_says_so() -> None:
    kernels = bindings.Kernels(str(build()), PERMITTED)
    if not kernels.instructions.startswith("AMX tiles"):
        assert kernels.instructions.endswith("; the compiler, or AIOINFER_CXXFLAGS, does without AMX)")
