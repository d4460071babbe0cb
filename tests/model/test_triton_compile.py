"""All kernels compile for GPUs of several generations, with none at hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from aioinfer.model.triton_support import shared_memory
from tests.model.kernels import SPILLED, compiled
from tests.tiers import COMPILES, nightly

#: of a layer, each compiled once
LAYER = ("_rotate_kernel", "_store_kernel", "_gate_mul_kernel", "_prefill_kernel")
DECODE = ("_decode_kernel", "_combine_kernel", "_combine_prefill_kernel")
#: those that are launched while the kernel before still runs, where a device can do that
EARLY = ("_rotate_kernel", "_norm_kernel", "_gate_mul_kernel", "_decode_kernel", "_combine_kernel")


def check_resources(kernel: dict[str, Any], capability: tuple[int, int]) -> None:
    """It fits, spills next to nothing, and is compiled by the end of the second step."""
    assert kernel["shared"] <= shared_memory(capability), kernel
    assert kernel["stack"] <= SPILLED, kernel
    assert kernel["step"] < 2, kernel


@nightly(COMPILES)
def test_kernels_compile_for_sm_90_and_once(tmp_path: Path) -> None:
    kernels = compiled("tests.model.compile_kernels", tmp_path, "90")
    count = Counter((kernel["shape"], kernel["name"]) for kernel in kernels)
    # With something to add and without.
    layer = {**dict.fromkeys((*LAYER, *DECODE), 1), "_norm_kernel": 2}
    invariant = {**dict.fromkeys(LAYER, 1), "_norm_kernel": 2}
    layers = dict.fromkeys(("qwen3-8b", "capped", "256", "256-float32"), layer) | {"invariant": invariant}
    assert count == {
        **{(shape, name): times for shape, names in layers.items() for name, times in names.items()},
        ("llada2-mini", "_rotate_kernel"): 1,
        # With a bias and without.
        ("linear", "_linear_kernel"): 2,
        ("linear-odd", "_linear_kernel"): 2,
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
        check_resources(kernel, (9, 0))
        assert kernel["early"] == kernel["follows"] == (kernel["name"] in EARLY), kernel
        half = "float32" not in kernel["shape"] and kernel["shape"] != "linear-odd"
        # The large tiles of experts are those of the second step.
        large = kernel["name"] == "_product_kernel" and kernel["step"] == 1
        by_unit = kernel["name"] in ("_prefill_kernel", "_linear_kernel") and half
        assert kernel["wgmma"] == (by_unit or large), kernel
        if kernel["name"] in ("_prefill_kernel", "_decode_kernel"):
            # With a mask and without, what a key weighs is the power of one multiply-add, and what the keys
            # before it weigh that of a difference. Rounding that is not stated is up to the compiler.
            assert {"fma.rn.f32", "sub.rn.f32"} <= kernel["exponents"].keys(), kernel
            assert kernel["exponents"].keys() <= {"fma.rn.f32", "sub.rn.f32", "mul.rn.f32"}, kernel


@nightly(COMPILES)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (12, 0)], ids=lambda each: f"sm_{each[0]}{each[1]}")
def test_tiles_fit_other_gpus(tmp_path: Path, capability: tuple[int, int]) -> None:
    """Ampere, Ada and consumer Blackwell; of these, two have less than half of Hopper's shared memory."""
    architecture = str(10 * capability[0] + capability[1])
    kernels = compiled("tests.model.compile_kernels", tmp_path, architecture)
    prefills = [kernel for kernel in kernels if kernel["name"] == "_prefill_kernel"]
    assert len(prefills) == 11
    for kernel in kernels:
        check_resources(kernel, capability)
        assert not kernel["early"], kernel
        assert not kernel["follows"], kernel


def test_an_unknown_gpu_is_taken_for_a_small_one() -> None:
    assert shared_memory((9, 0)) == 227 << 10
    assert shared_memory((99, 9)) == shared_memory((8, 9)) == 99 << 10
