"""The sampling kernels compile for Hopper, with no GPU at hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.model.kernels import compiled
from tests.tiers import COMPILES, battery

#: registers of a thread at which two programs of eight warps share a multiprocessor
REGISTERS = 128


@battery(COMPILES)
def test_kernels_compile_for_sm_90_once_and_spill_nothing(tmp_path: Path) -> None:
    kernels = compiled("tests.sampling.compile_kernels", tmp_path)
    count = Counter((kernel["shape"], kernel["name"]) for kernel in kernels)
    # Scan and bound know whether anything is drawn; single logits are biased or banned.
    twice = {"_scan_kernel", "_bound_kernel", "_add_kernel"}
    names = twice | {"_collect_kernel", "_finish_kernel", "_penalise_kernel", "_mask_kernel"}
    assert count == {(shape, name): 1 + (name in twice) for shape in ("qwen3", "gpt2") for name in names}
    for kernel in kernels:
        # Nobody's request waits for a compiler.
        assert kernel["step"] == 0, kernel
        assert kernel["registers"] <= REGISTERS, kernel
        assert kernel["stack"] == 0, kernel
        assert kernel["shared"] <= 48 << 10, kernel
