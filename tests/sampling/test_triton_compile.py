"""The sampling kernels compile for GPUs from Ampere to Blackwell, with none at hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.model.kernels import compiled
from tests.tiers import COMPILES, nightly

#: registers of a thread at which two programs of eight warps share a multiprocessor
REGISTERS = 128
#: by kernel, how many versions there are for tokens, and for blocks: with filters or without; with sums or
#: without and with the entropy; and whether wide rows are searched
VERSIONS = {
    "scan_kernel": (2, 4),
    "bound_kernel": (2, 4),
    "collect_kernel": (1, 2),
    "finish_kernel": (3, 2),
    "_narrow_kernel": (2, 2),
    "_draw_kernel": (1, 1),
    "_settle_kernel": (1, 1),
    # Single logits are biased or banned.
    "_add_kernel": (2, 0),
    "_penalise_kernel": (1, 0),
    "_mask_kernel": (1, 0),
    "_propose_kernel": (0, 2),
}


@nightly(COMPILES)
@pytest.mark.parametrize("capability", [80, 89, 90, 120])
def test_kernels_compile_once_and_spill_next_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: int
) -> None:
    monkeypatch.setenv("COMPILE_CAPABILITY", str(capability))
    kernels = compiled("tests.sampling.compile_kernels", tmp_path)
    count = Counter((kernel["shape"], kernel["name"]) for kernel in kernels)
    expected = {
        (shape, name): versions[shape == "llada2"]
        for shape in ("qwen3", "gpt2", "llada2")
        for name, versions in VERSIONS.items()
    }
    assert count == {key: number for key, number in expected.items() if number}
    for kernel in kernels:
        # Nobody's request waits for a compiler.
        assert kernel["step"] == 0, kernel
        assert kernel["registers"] <= REGISTERS, kernel
        # Of a version or two, by target and release of Triton.
        assert kernel["stack"] <= 8 * (kernel["name"] == "finish_kernel"), kernel
        assert kernel["shared"] <= 48 << 10, kernel
