"""Numerics: which engines compute the same bits, and so may take over from each other."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aioinfer.config import EngineConfig
from aioinfer.execution.device import DeviceInfo
from aioinfer.loop.factory import completed
from aioinfer.native import bindings
from aioinfer.native.bindings import arithmetic
from tests.tiers import PROGRAM, rest

AVX2 = DeviceInfo(
    1 << 20,
    4096,
    64,
    frozenset(),
    "",
    dtype="bfloat16",
    device="cpu",
    kernels={"layers": "native (it is a CPU)", "instructions": "AVX2 (it has no AMX)"},
    arithmetic="fused",
)


def numerics(info: DeviceInfo) -> str:
    return completed(info, None, EngineConfig(model="tiny-chat")).numerics


def other(instructions: str, arithmetic: str) -> DeviceInfo:
    kernels = {**AVX2.kernels, "instructions": instructions}
    return dataclasses.replace(AVX2, kernels=kernels, arithmetic=arithmetic)


def test_processors_with_the_same_arithmetic_count_as_equal() -> None:
    assert numerics(other("NEON dotprod", "fused")) == numerics(AVX2)
    assert numerics(other("AMX tiles", "tiles")) != numerics(AVX2)


def test_of_unknown_arithmetic_processors_with_the_same_instructions_are_equal() -> None:
    """A part that torch computes may depend on the processor."""
    assert numerics(other("AVX-512", "")) != numerics(other("AVX2", ""))
    assert numerics(other("AVX2 (for another reason)", "")) == numerics(other("AVX2", ""))


class Compiled:
    """Kernels of one class."""

    def __init__(self, name: str) -> None:
        self.name = name

    def function(self, name: str) -> bytes:
        assert name == "arithmetic"
        return self.name.encode()


@pytest.mark.parametrize(
    ("found", "rounded", "packed"),
    [
        ("fused", "fused", "fused"),
        ("unfused", "unfused", "unfused"),
        ("bf16 dot", "fused", "bf16 dot"),
        ("tiles", "tiles", "tiles"),
    ],
)
def test_the_arithmetic_of_bfloat16_depends_on_the_weights(
    found: str, rounded: str, packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bindings, "kernels", lambda: Compiled(found))
    assert arithmetic("bfloat16", packed=False) == rounded
    assert arithmetic("bfloat16", packed=True) == packed
    assert arithmetic("float32", packed=True) == ("unfused" if found == "unfused" else "fused")


@rest(PROGRAM)
def test_rotary_frequencies_do_not_depend_on_the_instructions_of_torch() -> None:
    """Its power in float32 does, for some of these: (theta, dimensions that are rotated)."""
    code = """if True:
        from types import SimpleNamespace
        import torch
        from aioinfer.model.rope import Rope
        for theta in (1e4, 1.5e5, 1.6e5, 5e5, 1e6, 3e6, 8e6):
            for size in (32, 48, 64, 80, 96, 128):
                config = SimpleNamespace(rope_parameters={"rope_theta": theta})
                print(Rope(config, size, 1, torch.float32, torch.device("cpu")).digest)
    """
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "ATEN_CPU_CAPABILITY": capability},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for capability in ("default", "avx2")
    }
    assert len(found) == 1
    assert len(found.pop().split()) == 42
