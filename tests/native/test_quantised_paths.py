"""Every instruction path gives quantised layers the same bits: ``quantised.cpp`` is compiled for each.

What this processor cannot run is compiled, and its logic runs on a model of its instructions in plain C++.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from aioinfer.native.arguments import LinearArguments, WeightsArguments
from aioinfer.native.bindings import kernels
from aioinfer.native.build import _FLAGS, _SOURCE, find_compiler
from aioinfer.native.structures import Arguments
from tests.native.support import normal
from tests.tiers import COMPILES, nightly

pytestmark = [
    nightly(COMPILES),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86"),
]

#: compiled without contraction, as build.py does
_COMMAND = [*_FLAGS, "-O1", "-Wall", "-Wextra", "-Wno-psabi", "-ffp-contract=off"]
#: the entry points
_MODELS = ["models.cpp", "-DNUMBER=float", "-DNAME=float32"]
#: what every processor runs that this project is tested on
RUN = {
    "baseline": "-march=x86-64-v2",
    "avx2": "-march=x86-64-v3",
    "model of AVX-VNNI": "-march=x86-64-v3 -DAIOINFER_PLAIN_DOT=8",
    "model of AVX-512 VNNI": "-march=x86-64-v3 -DAIOINFER_PLAIN_DOT=16",
}
COMPILE = {
    "AVX-VNNI": "-march=x86-64-v3 -mavxvnni",
    "AVX-512 VNNI": "-march=x86-64-v4 -mavx512vnni",
    "AVX-512 without VNNI": "-march=x86-64-v4",
}
SHAPES = [(4, 0), (4, 32), (4, 64), (4, 128), (8, 0), (8, 32), (8, 128)]


def compiled(flags: str, target: Path, sources: list[str], *more: str) -> None:
    command = [*find_compiler(), *_COMMAND, *flags.split(), *more, "-o", str(target)]
    files = [name if name.startswith("-") else str(_SOURCE / name) for name in sources]
    done = subprocess.run([*command, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr


class Build:
    """The entry points of quantised layers in one library."""

    def __init__(self, path: str) -> None:
        self.built = ctypes.CDLL(path)
        self.built.aioinfer_thread_pool.restype = ctypes.c_void_p
        self.pool = self.built.aioinfer_thread_pool(2)

    def call(self, name: str, arguments: Arguments, result: Any) -> Any:
        function = self.built[f"aioinfer_{name}_float32"]
        function.restype = result
        made = function(ctypes.byref(arguments))
        assert made
        return made

    def results(self, bits: int, group: int) -> list[torch.Tensor]:
        """Of rounded weights, for few and many rows."""
        found = []
        weight, bias = normal(96, 333, seed=1) * 0.1, normal(96, seed=2)
        weight *= torch.logspace(-3, 3, 96)[:, None]
        packing = WeightsArguments(
            pool=self.pool, rows=weight.data_ptr(), bias=bias.data_ptr(), outputs=96, inner=333,
            bits=bits, group=group, gated=False,
        )  # fmt: skip
        handle = self.call("weights", packing, ctypes.c_void_p)
        for rows in (1, 2, 3, 4, 5, 7, 8, 40):
            values, out = normal(rows, 333, seed=rows), torch.empty(rows, 96)
            arguments = LinearArguments(
                pool=self.pool, weights=handle, values=values.data_ptr(), count=rows, inner=333,
                out=out.data_ptr(),
            )  # fmt: skip
            self.call("linear", arguments, ctypes.c_bool)
            found.append(out)
        self.built.aioinfer_free_weights_float32(ctypes.c_void_p(handle))
        return found


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """``others(march)``: the objects besides that of the path, for which they are the same; compiled once."""

    @functools.cache
    def objects(march: str) -> list[str]:
        place = tmp_path_factory.mktemp("objects")
        for name, sources in {"models.o": _MODELS, "common.o": ["common.cpp"]}.items():
            compiled(march, place / name, sources, "-c")
        return [str(place / "models.o"), str(place / "common.o")]

    return objects


@pytest.mark.timeout(500, method="thread")
@pytest.mark.parametrize("name", RUN)
def test_a_path_gives_the_bits_of_this_processors_own(
    name: str, tmp_path: Path, others: Callable[[str], list[str]]
) -> None:
    target = tmp_path / "library.so"
    compiled(RUN[name], target, ["quantised.cpp"], "-shared", *others(RUN[name].split()[0]))
    own, other = Build(kernels()._library._name), Build(str(target))
    for bits, group in SHAPES:
        for wanted, got in zip(own.results(bits, group), other.results(bits, group), strict=True):
            assert wanted.isfinite().all()
            assert torch.equal(got, wanted), (bits, group, len(got))


@pytest.mark.timeout(500, method="thread")
@pytest.mark.parametrize("name", COMPILE)
def test_a_path_that_may_not_run_here_compiles(name: str, tmp_path: Path) -> None:
    compiled(COMPILE[name], tmp_path / "object.o", ["quantised.cpp"], "-c")
