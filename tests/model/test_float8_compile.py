"""The kernels for floats of 8 bits compile for GPUs of several generations, with none at hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.model.kernels import SPILLED, compiled
from tests.tiers import COMPILES, nightly

#: KiB of shared memory that a program can have, by compute capability without its point
SHARED = {"80": 163, "89": 99, "90": 227, "120": 99}
#: compilations of products, by the number of rows
TILES = 5


@nightly(COMPILES)
@pytest.mark.parametrize("architecture", SHARED)
def test_kernels_for_floats_of_8_bits_compile_once_and_spill_next_to_nothing(
    tmp_path: Path, architecture: str
) -> None:
    kernels = compiled("tests.model.compile_float8", tmp_path, architecture)
    count = Counter((kernel["shape"], kernel["name"]) for kernel in kernels)
    # The largest tiles with sums in parts and without; those of float32 are all alike.
    products = {"rows": TILES, "blocks": TILES, "sums": TILES, "odd": 1}
    layer = {"_store_kernel", "_rotate_kernel", "_decode_kernel", "_combine_kernel", "_prefill_kernel"}
    for shape in ("kv", "kv-capped", "kv-large", "kv-half"):
        found = {name: count.pop((which, name)) for which, name in list(count) if which == shape}
        assert layer <= found.keys()
        assert set(found.values()) == {1}
    # Small tiles and large ones, each for gate and up and for down; float32 has but the small ones.
    for shape, tiles in (("experts-blocks", 2), ("experts-rows", 2), ("experts-odd", 1)):
        found = {name: count.pop((which, name)) for which, name in list(count) if which == shape}
        assert found == {"_align_kernel": tiles, "_product_kernel": 2 * tiles, "_sum_kernel": 1}
    assert count == {
        **{(shape, "_product_kernel"): times for shape, times in products.items()},
        **dict.fromkeys(((shape, "_round_kernel") for shape in products), 1),
        **{(shape, "_sum_kernel"): 1 for shape in ("rows", "blocks", "sums")},
    }
    for kernel in kernels:
        assert kernel["step"] < TILES, kernel
        assert kernel["shared"] <= SHARED[architecture] << 10, kernel
        assert kernel["stack"] <= SPILLED, kernel
        # From 17 rows on a program has enough weights for the matrix unit of Hopper, but not of float32.
        by_unit = kernel["name"] == "_product_kernel" and kernel["step"] > 0 and "odd" not in kernel["shape"]
        by_unit |= kernel["name"] == "_prefill_kernel" and kernel["shape"] != "kv-large"
        # And with few tokens a tile of down, but not one of gate and one of up.
        if kernel["shape"].startswith("experts") and kernel["step"] == 0:
            continue
        assert kernel["wgmma"] == (architecture == "90" and by_unit), kernel
