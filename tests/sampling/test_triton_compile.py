"""The sampling kernels compile for Hopper, with no GPU at hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: registers of a thread at which two programs of eight warps share a multiprocessor
REGISTERS = 128


def test_kernels_compile_for_sm_90_once_and_spill_nothing(tmp_path: Path) -> None:
    """In a process of its own: whether Triton compiles or interprets is settled on import."""
    pytest.importorskip("triton", reason="triton is not installed")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    env |= {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sampling.compile_kernels"],
        cwd=ROOT, env=env, text=True, capture_output=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    count = Counter((kernel["shape"], kernel["name"]) for kernel in kernels)
    # Scan and bound know whether anything is drawn; single logits are biased or banned.
    twice = {"_scan_kernel", "_bound_kernel", "_add_kernel"}
    names = twice | {"_collect_kernel", "_finish_kernel", "_penalise_kernel", "_mask_kernel"}
    assert count == {(shape, name): 1 + (name in twice) for shape in ("qwen3", "gpt2") for name in names}
    for kernel in kernels:
        # Nobody's request waits for a compiler.
        assert not kernel["late"], kernel
        assert kernel["reg"] <= REGISTERS, kernel
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= 48 << 10, kernel
