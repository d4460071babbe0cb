"""The kernels pass their tests however they are compiled. What this processor cannot run is compiled, and its
logic runs on a model of its instructions in plain C++."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from aioinfer.native import levels
from aioinfer.native.build import find_compiler
from tests.native.builds import FLAGS, passes
from tests.tiers import COMPILES, nightly

pytestmark = [
    nightly(COMPILES),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86"),
]
#: ways to multiply besides those of the processor at hand and of tiles
PATHS = [name for name in FLAGS if "sanitize" not in FLAGS[name] and not name.startswith("tiles")]
PRODUCTS = [f"tests/native/test_{name}.py" for name in ("quantised", "linear", "laws")]
#: tests of kernels that depend on how products are computed, of about equal length by process
KERNELS = [
    ["native/test_attention", "native/test_invalid_arguments", "native/test_linear"],
    ["native/test_decoder", "native/test_quantised", "native/test_quantization", "native/test_thread_pool"],
    ["native/test_laws", "model/test_native_experts", "engine/test_deterministic"],
]


@pytest.mark.timeout(1200, method="thread")
@pytest.mark.parametrize("name", PATHS)
def test_every_path_gives_layers_the_bits_of_their_arithmetic(name: str) -> None:
    assert passes(name, PRODUCTS)


@pytest.mark.timeout(1200, method="thread")
@pytest.mark.parametrize("names", KERNELS, ids=" ".join)
def test_the_kernels_pass_their_tests_on_modelled_tiles(names: list[str]) -> None:
    assert passes("tiles", [f"tests/{name}.py" for name in names])


@pytest.mark.timeout(500, method="thread")
@pytest.mark.parametrize(
    "flags",
    ["-march=x86-64-v3 -mavxvnni", "-march=x86-64-v4 -mavx512vnni", "-march=x86-64-v4"],
    ids=["AVX-VNNI", "AVX-512 VNNI", "AVX-512 without VNNI"],
)
def test_a_path_that_may_not_run_here_compiles(flags: str, tmp_path: Path) -> None:
    warnings = ["-Wall", "-Wextra", "-Wno-psabi", "-Werror"]
    command = [*find_compiler(), *levels.FLAGS, "-O1", "-ffp-contract=off", *warnings, *flags.split()]
    files = ["-c", str(levels.SOURCE / "quantised.cpp"), "-o", str(tmp_path / "object.o")]
    subprocess.run([*command, *files], check=True, timeout=480)
