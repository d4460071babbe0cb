"""All kernels compile for GPUs of several generations, with none at hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from aioinfer.model.triton_support import shared_memory
from tests.model.kernels import SPILLED, compiled
from tests.tiers import COMPILES, nightly

_LAYER = {**dict.fromkeys(("rotate", "store", "prefill"), 1), "gate_mul": 1, "norm": 2}
_DECODE = dict.fromkeys(("decode", "combine", "combine_prefill"), 1)
_KV = {**_DECODE, **dict.fromkeys(("rotate", "store", "prefill"), 1)}
#: small tiles and large ones, each for gate and up and for down; float32 has but the small ones
_EXPERTS, _EXPERTS_32 = ({"align": tiles, "product": 2 * tiles, "sum": 1} for tiles in (2, 1))
_LINEAR, _ADAPTERS = {"linear": 2}, {"shrink": 1, "expand": 1}
_PRODUCTS = {"product": 5, "round": 1, "sum": 1}
#: by set of kernels and shape, how often each kernel is compiled: norms with something to add and without,
#: products in a fixed order with a bias and without, two rules of routing, which in float32 share logits
VERSIONS: dict[str, dict[str, dict[str, int]]] = {
    "plain": {
        **dict.fromkeys(("qwen3-8b", "64", "80", "256", "capped"), _LAYER | _DECODE),
        **dict.fromkeys([f"{size}-float32" for size in (64, 80, 128, 256)], _LAYER | _DECODE),
        "invariant": _LAYER,
        "llada2-mini": {"rotate": 1},
        **dict.fromkeys(("linear", "linear-float32"), _LINEAR),
        "qwen3-30b-a3b": {**_EXPERTS, "logits": 2, "choose": 2},
        "experts-float32": {**_EXPERTS_32, "logits": 1, "choose": 2},
        **dict.fromkeys(("adapters-qkv", "adapters-odd"), _ADAPTERS),
    },
    "float8": {
        **dict.fromkeys(("rows", "blocks", "sums"), _PRODUCTS),
        "products-float32": {"product": 1, "round": 1},
        **dict.fromkeys(("experts-blocks", "experts-rows"), _EXPERTS),
        "experts-float32": _EXPERTS_32,
        **dict.fromkeys(("kv", "kv-capped", "kv-large", "kv-half"), _KV),
    },
}
#: those that are launched while the kernel before still runs, where a device can do that
EARLY = {"rotate", "norm", "gate_mul", "decode", "combine"}


def by_matrix_unit(kind: str, shape: str, name: str, step: int) -> bool:
    """Whether a kernel has enough work for the matrix unit of Hopper, which does not compute float32."""
    if "float32" in shape:
        return False
    if name == "product":
        # The large tiles of experts are those of the second step; of products, those of 17 rows on.
        return step > 0
    return name == "linear" or (name == "prefill" and shape != "kv-large")


@nightly(COMPILES)
@pytest.mark.parametrize("kind", VERSIONS)
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)], ids=str)
def test_kernels_compile_once_fit_and_spill_next_to_nothing(
    tmp_path: Path, capability: tuple[int, int], kind: str
) -> None:
    """Ampere, Ada, Hopper, consumer Blackwell: two have less than half of Hopper's shared memory."""
    hopper, architecture = capability == (9, 0), str(10 * capability[0] + capability[1])
    kernels = compiled("tests.model.compile_kernels", tmp_path, architecture, kind)
    for kernel in kernels:
        kernel["name"] = kernel["name"].removeprefix("_").removesuffix("_kernel")
    count = Counter((kernel["shape"], kernel["name"]) for kernel in kernels)
    shapes = VERSIONS[kind].items()
    assert count == {(shape, name): times for shape, names in shapes for name, times in names.items()}
    for kernel in kernels:
        shape, name, step = kernel["shape"], kernel["name"], kernel["step"]
        assert kernel["shared"] <= shared_memory(capability), kernel
        assert kernel["stack"] <= SPILLED, kernel
        # By the end of the second step, or of a step of every tuning.
        assert step < (5 if kind == "float8" else 2), kernel
        assert kernel["early"] == kernel["follows"] == (hopper and name in EARLY), kernel
        # With few tokens a tile of down, but not one of gate and one of up.
        if not (kind == "float8" and shape.startswith("experts") and step == 0):
            assert kernel["wgmma"] == (hopper and by_matrix_unit(kind, shape, name, step)), kernel
        if hopper and kind == "plain" and name in ("prefill", "decode"):
            # With a mask and without, what a key weighs is the power of one multiply-add, and what the keys
            # before it weigh that of a difference. Rounding that is not stated is up to the compiler.
            assert {"fma.rn.f32", "sub.rn.f32"} <= kernel["exponents"].keys(), kernel
            assert kernel["exponents"].keys() <= {"fma.rn.f32", "sub.rn.f32", "mul.rn.f32"}, kernel


def test_an_unknown_gpu_is_taken_for_a_small_one() -> None:
    assert shared_memory((9, 0)) == 227 << 10
    assert shared_memory((99, 9)) == shared_memory((8, 9)) == 99 << 10
