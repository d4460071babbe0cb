"""Kernels give the same bits on every processor and by every compiler.

A program of all kernels prints a hash of each result; see ``bits.cpp``. What is compared are the lines whose
class of arithmetic two builds share: for bfloat16 that is neither rounded nor widened, ARM has an order of
its own, which the program compares with a model.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from aioinfer.native.processor import MODELLED, instruction_sets
from tests.native.emulation import ARM, compile_program, emulator, zig
from tests.native.instructions import per_product
from tests.tiers import COMPILES, nightly

_X86 = platform.machine() == "x86_64" and {"avx2", "fma"} <= set(instruction_sets().split())
pytestmark = pytest.mark.skipif(not _X86, reason="compares with kernels for AVX2")
patient = pytest.mark.timeout(1200, method="thread")
_AVX512 = "avx512f" in instruction_sets().split()
_NEEDS_AVX512 = pytest.mark.skipif(not _AVX512, reason="this processor has no AVX-512")
#: what two builds for different lengths of vectors have in common; see bits.cpp
_LINES = 31
Bits = Mapping[str, str]


def bits_of(command: Sequence[str]) -> Bits:
    """Hashes by class and name. Fails where a result depends on its company."""
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = done.stdout.splitlines()[1:]
    return dict(line.rsplit(": ", 1) for line in lines)


def built(flags: str, directory: Path, compiler: Sequence[str] = ()) -> Bits:
    return bits_of([str(compile_program("bits", compiler, flags.split(), directory))])


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Bits:
    found = built("-march=x86-64-v3", tmp_path_factory.mktemp("reference"))
    assert len(found) == _LINES
    return found


def differing(found: Bits, reference: Bits) -> list[str]:
    return [name for name in found.keys() & reference.keys() if found[name] != reference[name]]


@patient
@nightly(COMPILES)
@pytest.mark.parametrize("level", ARM)
def test_arm_has_the_bits_of_x86(level: str, reference: Bits, tmp_path: Path) -> None:
    """But for products of packed bfloat16 by its own instructions."""
    run = emulator()
    flags, processor = ARM[level]
    program = compile_program("bits", zig("aarch64-linux-musl"), [*flags.split(), "-static"], tmp_path)
    found = bits_of([run, "-cpu", processor, str(program)])
    own = {name.partition(": ")[2] for name in found.keys() - reference.keys()}
    assert own == ({"bfloat16 linear 0 0", "bfloat16 model 0"} if level == "i8mm" else set())
    assert differing(found, reference) == []
    assert len(found) == _LINES


@patient
@nightly(COMPILES)
@pytest.mark.parametrize(
    "flags",
    [
        "-march=native",
        pytest.param("-march=x86-64-v4", marks=_NEEDS_AVX512),
        "-march=x86-64-v3 -O1",
        "-march=x86-64-v3 -DAIOINFER_PLAIN_DOT=16",
    ],
)
def test_x86_has_the_same_bits_with_vectors_of_any_length(
    flags: str, reference: Bits, tmp_path: Path
) -> None:
    found = built(flags, tmp_path)
    assert found == reference


@patient
@nightly(COMPILES)
@pytest.mark.parametrize("processor", ["x86_64_v3", pytest.param("x86_64_v4", marks=_NEEDS_AVX512)])
def test_clang_gives_the_bits_of_gcc(processor: str, reference: Bits, tmp_path: Path) -> None:
    assert built(f"-mcpu={processor}", tmp_path, zig("x86_64-linux-musl")) == reference


@patient
@nightly(COMPILES)
@pytest.mark.parametrize("flags", ["-march=x86-64-v2", f"-march=x86-64-v3 {' '.join(MODELLED.flags)}"])
def test_other_arithmetic_has_another_name(flags: str, reference: Bits, tmp_path: Path) -> None:
    """And what is exact is the same everywhere."""
    found = built(flags, tmp_path)
    assert len(found) == _LINES
    assert differing(found, reference) == []
    assert sum(name.startswith("exact") for name in found.keys() & reference.keys()) == 14
    assert found.keys() - reference.keys()


@patient
@nightly(COMPILES)
def test_arms_products_take_few_instructions() -> None:
    """Less than half of those that widen bfloat16, and a sixth of those that multiply single bytes."""
    zig("aarch64-linux-musl")
    plain, own = per_product("plain"), per_product("i8mm")
    for rows in (1, 4):
        assert own["packed", rows] * 2 < plain["packed", rows]
        assert own["int8", rows] * 6 < plain["int8", rows]
