"""All kernels compile for Hopper, with no GPU at hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from tests.model.kernels import compiled
from tests.tiers import COMPILES, battery

#: shared memory that a program can have on sm_90
SHARED = 227 << 10


@battery(COMPILES)
def test_kernels_compile_for_sm_90_and_once(tmp_path: Path) -> None:
    kernels = compiled("tests.model.compile_kernels", tmp_path)
    count = Counter((kernel["shape"], kernel["name"]) for kernel in kernels)
    layer = dict.fromkeys(("_store_kernel", "_rotate_kernel", "_gate_mul_kernel"), 1)
    layer |= dict.fromkeys(("_decode_kernel", "_combine_kernel", "_prefill_kernel"), 1)
    # With something to add and without.
    layer["_norm_kernel"] = 2
    assert count == {
        **{(shape, name): times for shape in ("qwen3-8b", "capped") for name, times in layer.items()},
        ("llada2-mini", "_rotate_kernel"): 1,
        # Two rules of routing; in float32 both have the same logits.
        ("qwen3-30b-a3b", "_logits_kernel"): 2,
        ("qwen3-30b-a3b", "_choose_kernel"): 2,
        ("float32-odd", "_logits_kernel"): 1,
        ("float32-odd", "_choose_kernel"): 2,
        # Small tiles and large ones, each for gate and up and for down; float32 has but the small ones.
        ("qwen3-30b-a3b", "_align_kernel"): 2,
        ("qwen3-30b-a3b", "_product_kernel"): 4,
        ("qwen3-30b-a3b", "_sum_kernel"): 1,
        ("float32-odd", "_align_kernel"): 1,
        ("float32-odd", "_product_kernel"): 2,
        ("float32-odd", "_sum_kernel"): 1,
        **{
            (f"adapters-{shape}", f"_{name}_kernel"): 1
            for shape in ("qkv", "odd")
            for name in ("shrink", "expand")
        },
    }
    for kernel in kernels:
        assert kernel["step"] < 2, kernel
        assert kernel["shared"] <= SHARED, kernel
        assert kernel["stack"] == 0, kernel
        # The large tiles of experts are those of the second step.
        large = kernel["name"] == "_product_kernel" and kernel["step"] == 1
        if kernel["name"] in ("_prefill_kernel", "_decode_kernel"):
            # With a mask and without, what a key weighs is the power of one multiply-add, and what the keys
            # before it weigh that of a difference. Rounding that is not stated is up to the compiler.
            assert {"fma.rn.f32", "sub.rn.f32"} <= kernel["exponents"].keys(), kernel
            assert kernel["exponents"].keys() <= {"fma.rn.f32", "sub.rn.f32", "mul.rn.f32"}, kernel
        assert kernel["wgmma"] == (kernel["name"] == "_prefill_kernel" or large), kernel
