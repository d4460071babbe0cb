"""Norm, rotation and store in one kernel against torch: same rounding, and nothing written elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from aioinfer.model.heads import HeadNorm, split_heads
from aioinfer.model.rope import Rotary
from tests.model.kernels import integers, normal
from tests.tiers import INTERPRETER, grid, points

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


HEADS = [(1, 1), (3, 1), (14, 2), (5, 5), (32, 8)]


def projection(
    tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    make: Callable[..., torch.Tensor],
    rotated: int | None = None,
) -> tuple[torch.Tensor, HeadNorm, Rotary]:
    qkv = make(tokens, heads + 2 * kv_heads, head_dim, seed=10)
    weight = 1 + 0.3 * normal(heads + kv_heads, head_dim, seed=11)
    angles = normal(tokens, 1, rotated or head_dim, seed=12)
    return qkv, HeadNorm(weight, 1e-6), Rotary(angles.cos(), angles.sin())


def stores(
    device: str,
    dtype: torch.dtype,
    head_dim: int,
    heads: tuple[int, int],
    make: Callable[..., torch.Tensor],
    *,
    norm: str | None,
    page_size: int = 16,
    rotated: int | None = None,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What the kernel gave and wrote, and what it should have: queries, then keys and values of a whole
    pool that held NaN before. The last two tokens are padding. ``norm``: "qk", or "qkv" of Gemma 4, whose
    values have no weight of their own and whose weights are float32."""
    from aioinfer.model.attention.triton_heads import rotate_and_store

    qkv, head_norm, rotary = projection(5, *heads, head_dim, make, rotated)
    qkv, cos, sin = (t.to(dtype) for t in (qkv, rotary.cos, rotary.sin))
    weight = head_norm.weight.to(dtype)
    if norm == "qkv":
        weight = torch.cat((head_norm.weight, torch.ones(heads[1], head_dim)))
    slots = torch.tensor([2 * page_size + 1, 3 * page_size - 1, page_size, 0, 0])
    given = HeadNorm(weight, 1e-6) if norm else None
    q, k, v = split_heads(qkv, heads[1], given, Rotary(cos, sin))
    pool = [torch.full((3, page_size, heads[1], head_dim), math.nan, dtype=dtype) for _ in range(2)]
    keys, values = (store.to(device) for store in pool)
    on_device = HeadNorm(weight.to(device), 1e-6) if norm else None
    got = rotate_and_store(
        qkv.to(device), on_device, Rotary(cos.to(device), sin.to(device)), keys, values, slots.to(device)
    )
    for store, written, rows in ((pool[0], keys, k), (pool[1], values, v)):
        store.flatten(0, 1)[slots[:3]] = rows[:3]
        # Of the two that share the junk cell, either, number by number: programs write at the same time.
        junk = written.flatten(0, 1)[0].cpu()
        near = [torch.isclose(junk.float(), row.float(), rtol=1e-2, atol=1e-2) for row in rows[3:]]
        assert (near[0] | near[1]).all()
        store.flatten(0, 1)[0] = junk
    return [(got.cpu(), q), (keys.cpu(), pool[0]), (values.cpu(), pool[1])]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, "qk", "qkv"])
@pytest.mark.parametrize(
    ("at", "head_dim"), points([(0, 64), (5, 6)], [(1, 80), (2, 96), (3, 128), (4, 256), (6, 2)], INTERPRETER)
)
def test_heads_are_rotated_and_stored_with_torchs_bits(
    device: str, at: int, head_dim: int, norm: str | None, dtype: torch.dtype
) -> None:
    heads, page_size = HEADS[at % len(HEADS)], (16, 32, 64)[at % 3]
    found = stores(device, dtype, head_dim, heads, integers, norm=norm, page_size=page_size)
    for got, expected in found:
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [None, "qk"])
@pytest.mark.parametrize(
    ("head_dim", "rotated"),
    points([(64, 16), (6, 4)], [(128, 64), (80, 40), (96, 2), (80, 78), (4, 2)], INTERPRETER),
)
def test_a_part_of_each_head_is_rotated(
    device: str, head_dim: int, rotated: int, norm: str | None, dtype: torch.dtype
) -> None:
    """The rest has the bits it came with, or those of its norm."""
    for got, expected in stores(device, dtype, head_dim, (5, 2), integers, norm=norm, rotated=rotated):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_what_is_not_rotated_is_not_touched_by_what_is_not_a_number(device: str) -> None:
    """Nor by infinity: 0 * inf is not a number either."""
    from aioinfer.model.attention.triton_heads import rotate_and_store

    qkv, _, rotary = projection(1, 1, 1, 8, normal, 4)
    qkv[0, 0, 4:] = torch.tensor([1.0, float("inf"), float("nan"), 2.0])
    cos, sin = rotary.cos.to(device), rotary.sin.to(device)
    keys, values = (torch.zeros(1, 16, 1, 8, device=device) for _ in range(2))
    slots = torch.tensor([3], device=device)
    q = rotate_and_store(qkv.to(device), None, Rotary(cos, sin), keys, values, slots)
    expected, _, _ = split_heads(qkv, 1, None, rotary)
    torch.testing.assert_close(q.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    assert q[0, 0, :4].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", grid(HEADS[1:2], [HEADS[0], *HEADS[2:]], INTERPRETER))
def test_normed_heads_differ_in_last_bits_only(
    device: str, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    (q, wanted_q), (keys, wanted_keys), (values, wanted_values) = stores(
        device, dtype, 64, heads, normal, norm="qk"
    )
    # A rotation subtracts: its error is a part of what went in, which is up to 8.
    bound = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(q, wanted_q, rtol=0, atol=bound)
    torch.testing.assert_close(keys, wanted_keys, rtol=0, atol=bound, equal_nan=True)
    torch.testing.assert_close(values, wanted_values, rtol=0, atol=0, equal_nan=True)
    if dtype != torch.float32:
        assert (q != wanted_q).sum() <= max(1, q.numel() // 500)


@pytest.mark.parametrize("norm", [False, True])
def test_of_shared_keys_and_values_nothing_is_written(device: str, norm: bool) -> None:
    from aioinfer.model.attention.triton_heads import rotate_and_store

    qkv, given, rotary = projection(3, 4, 2, 32, normal)
    head_norm = HeadNorm(given.weight[:4], 1e-6) if norm else None
    (wanted, _, _) = split_heads(qkv[:, :4], 0, head_norm, rotary)
    keys, values = (torch.full((1, 16, 2, 32), math.nan, device=device) for _ in range(2))
    on_device = None if head_norm is None else HeadNorm(head_norm.weight.to(device), 1e-6)
    turned = Rotary(rotary.cos.to(device), rotary.sin.to(device))
    slots = torch.arange(3, device=device)
    q = rotate_and_store(qkv[:, :4].to(device), on_device, turned, keys, values, slots, shared=True)
    torch.testing.assert_close(q.cpu(), wanted, rtol=0, atol=1e-5)
    assert keys.isnan().all()
    assert values.isnan().all()


def test_projections_that_do_not_fit_are_refused_and_others_copied(device: str) -> None:
    from aioinfer.model.attention.triton_heads import rotate_and_store

    qkv, norm, rotary = projection(3, 2, 1, 8, normal)
    qkv, cos, sin = (t.to(device) for t in (qkv, rotary.cos, rotary.sin))
    norm, rotary = HeadNorm(norm.weight.to(device), norm.eps), Rotary(cos, sin)
    keys, values = (torch.zeros(2, 16, 1, 8, device=device) for _ in range(2))
    slots = torch.tensor([16, 17, 18], device=device)
    expected = rotate_and_store(qkv, norm, rotary, keys, values, slots)
    strided = qkv.mT.contiguous().mT
    again = [torch.zeros_like(keys), torch.zeros_like(values)]
    assert torch.equal(rotate_and_store(strided, norm, rotary, *again, slots), expected)
    assert torch.equal(again[0], keys)
    empty = Rotary(cos[:0], sin[:0])
    assert rotate_and_store(qkv[:0], norm, empty, keys, values, slots[:0]).shape == (0, 2, 8)
    for bad in (qkv[:, :2], qkv[..., :6], qkv[..., :7]):
        with pytest.raises(ValueError, match="does not fit"):
            rotate_and_store(bad, norm, rotary, keys, values, slots)
    for size in (0, 3, 10):
        wrong = torch.zeros(3, 1, size, device=device)
        with pytest.raises(ValueError, match=f"^{size} dimensions of heads of 8 cannot be rotated"):
            rotate_and_store(qkv, norm, Rotary(wrong, wrong), keys, values, slots)
    with pytest.raises(ValueError, match="contiguous"):
        rotate_and_store(qkv, norm, rotary, keys.transpose(0, 1), values, slots)
