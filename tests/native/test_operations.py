"""What is between the linear layers of an image encoder: norms and attention both ways, against the formulas
in float64."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F

from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.norm import Norm
from aioinfer.model.operations.native_operations import NativeOperations
from aioinfer.model.operations.torch_operations import TorchOperations
from aioinfer.model.vision.native_attention import NativeTwoWayAttention
from aioinfer.native.bindings import ThreadPool, shared_thread_pool
from tests.native.support import DTYPES, UNIT, normal


def normed(values: torch.Tensor, norm: Norm) -> torch.Tensor:
    weight, size = norm.weight.double(), values.shape[-1:]
    if norm.bias is None:
        return torch.rms_norm(values.double(), size, weight, norm.eps)
    return F.layer_norm(values.double(), size, weight, norm.bias.double(), norm.eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_norm_of_a_sum(*, bias: bool, dtype: torch.dtype) -> None:
    rng = random.Random(3)
    for rows, size in [(1, 16), (2, 48), (70, 768), (33, 1152)]:
        seed = rng.randrange(1 << 30)
        hidden = 3 * normal(rows, size, seed=seed, dtype=dtype) + 1
        delta = normal(rows, size, seed=seed + 1, dtype=dtype)
        norm = Norm(normal(size, seed=seed + 2, dtype=dtype), 1e-6, normal(size, seed=seed + 3, dtype=dtype))
        norm = norm if bias else Norm(norm.weight, norm.eps)
        several = [NativeOperations(ThreadPool(threads)) for threads in (1, 3)]
        for added in (None, delta):
            (sums, found), other = (each.add_norm(hidden, added, norm) for each in several)
            assert torch.equal(sums, hidden if added is None else hidden + added)
            assert torch.equal(found, other[1])
            wanted = normed(sums, norm)
            assert found.dtype == dtype
            assert ((found.double() - wanted).abs() <= 2e-6 + 1.01 * UNIT[dtype] * wanted.abs()).all(), (
                size,
                seed,
            )
        assert torch.equal(
            several[0].add_norm(hidden[:1], None, norm)[1], several[1].add_norm(hidden, None, norm)[1][:1]
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_below_the_least_normal_number_are_zero(dtype: torch.dtype) -> None:
    """As in products, with any instructions."""
    hidden = torch.full((1, 16), 3e-39, dtype=dtype)
    norm = Norm(torch.ones(16, dtype=dtype), 1e-30)
    sums, found = NativeOperations(shared_thread_pool(2)).add_norm(hidden, hidden, norm)
    assert not sums.any()
    assert not found.any()


def test_sizes_and_types_without_a_kernel_are_torchs() -> None:
    operations = NativeOperations(shared_thread_pool(2))
    for size, dtype in [(24, torch.float32), (64, torch.float16)]:
        hidden, delta = normal(3, size, seed=1, dtype=dtype), normal(3, size, seed=2, dtype=dtype)
        norm = Norm(normal(size, seed=3, dtype=dtype), 1e-6)
        pairs = zip(
            operations.add_norm(hidden, delta, norm),
            TorchOperations().add_norm(hidden, delta, norm),
            strict=True,
        )
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_patches_see_each_other_both_ways(dtype: torch.dtype) -> None:
    """In units of many sizes one after the other, with heads of sizes that kernels have, and others."""
    attend = NativeTwoWayAttention(shared_thread_pool(2), dtype)
    for patches, heads, size in [
        (1, 1, 16),
        (197, 3, 64),
        (33, 2, 72),
        (33, 2, 80),
        (400, 2, 20),
        (16, 4, 64),
    ]:
        qkv = normal(patches, 3 * heads, size, seed=patches, dtype=dtype)
        before = qkv.clone()
        query, key, value = (part.double().transpose(0, 1) for part in qkv.chunk(3, dim=1))
        wanted = F.scaled_dot_product_attention(query, key, value, scale=0.2).transpose(0, 1)
        found = attend(qkv, 0.2)
        assert found.dtype == dtype
        assert found.shape == wanted.shape
        error = (found.double() - wanted).abs().max().item()
        assert error <= (2e-6 if dtype == torch.float32 else 2e-2), (patches, size, error)
        alone = NativeTwoWayAttention(ThreadPool(3), dtype)
        assert torch.equal(alone(qkv, 0.2), found)
        assert torch.equal(qkv, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_exact_gelu(dtype: torch.dtype) -> None:
    values = torch.cat(
        (torch.linspace(-16, 16, 4092), torch.tensor([0.0, -1e4, 1e4, 1e-30]), torch.full((16,), math.nan))
    )
    values = values.to(dtype).view(-1, 16)
    identity = NativeLinear(shared_thread_pool(2), torch.eye(16, dtype=dtype), None)
    found, wanted = identity(values, "gelu").double(), F.gelu(values.double())
    # A row is a product with NaN, where it has one.
    finite = values.isfinite().all(dim=1)
    error = (found - wanted)[finite].abs()
    assert (error <= 1.01 * UNIT[dtype] * wanted[finite].abs() + 3e-7 * values[finite].abs()).all(), (
        error.max()
    )
    assert finite.sum() == len(values) - 1
    assert found[-1].isnan().all()
