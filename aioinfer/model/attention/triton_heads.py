"""From the fused projection to the KV cache in one launch: norm, rotate, store.

The projection of a token is [queries | keys | values], a row of heads. All heads are read once; queries and
keys are normed (if the model does that) and rotated; queries are written to a tensor of their own, keys and
values to the token's cell of the pool. Masks select the work of each lane:

    heads      0 ............ HEADS - 1 | ........ + KV_HEADS - 1 | ........ + KV_HEADS - 1
    lanes            norm, rotate       |       norm, rotate      |
    go to                 q             |     keys[cell]          |      values[cell]

A head is held as two halves a and b, paired by the rotation. It rotates the first ROTATED dimensions, d with
d + ROTATED / 2; the dimensions behind them, if there are any, are halved in the same way and not changed:

    lane       0 .......... ROTATED / 2 - 1 | ROTATED / 2 .......... HALF - 1
    a          the first quarter of a head, | the third,
    b          the second one               | the fourth, if half of a head is rotated

A value that is not finite is stored as it is in :func:`~aioinfer.model.attention.triton_common.not_finite`.

With the same mean square the bits are those of :func:`~aioinfer.model.heads.split_heads`: always without
a norm. With a norm the squares are added in another order than torch's: where the sum rounds differently, the
last bit of some elements differs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from aioinfer.model.attention.pool import KVScales
from aioinfer.model.attention.triton_common import (
    INTERPRETED,
    follow,
    inverse_rms,
    kv_arguments,
    not_finite,
    rounded,
)
from aioinfer.model.heads import HeadNorm
from aioinfer.model.rope import Rotary
from aioinfer.model.triton_float8 import exponent_of, magnitude, shrunk
from aioinfer.model.triton_support import launches_early

__all__ = ["rotate_and_store"]

#: approximate number of elements that a program holds
_TILE = 1024


# The alignment of a section of the packed buffer varies and must not select another compilation.
@triton.jit(do_not_specialize=["slot_mapping"])
def _rotate_kernel(
    qkv: tl.tensor, weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, slot_mapping: tl.tensor,
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, key_scales: tl.tensor, value_scales: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_H: tl.constexpr,
    HALF: tl.constexpr, ROTATED: tl.constexpr, BLOCK_D: tl.constexpr,
    NORM: tl.constexpr, VALUES: tl.constexpr, ONCE: tl.constexpr, INTERPRETED: tl.constexpr,
    FLOAT8: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_H heads of one token; with VALUES the norm is that of values, too; if ONCE, it is rounded only
    behind its weight. Grid (tokens, blocks of heads)."""
    follow(EARLY)
    token = tl.program_id(0).to(tl.int64)
    cell = tl.load(slot_mapping + token).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    lane = tl.arange(0, BLOCK_D)[None, :]
    inside = lane < HALF
    turns = lane < ROTATED // 2
    a_dim = lane
    b_dim = lane + HALF
    if ROTATED < 2 * HALF:
        a_dim = tl.where(turns, lane, lane + ROTATED // 2)
        b_dim = tl.where(turns, lane + ROTATED // 2, lane + HALF)
    is_query = (head < HEADS) & inside
    is_key = (head >= HEADS) & (head < HEADS + KV_HEADS) & inside
    is_value = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS) & inside
    at = (token * (HEADS + 2 * KV_HEADS) + head) * (2 * HALF)
    raw_a = tl.load(qkv + at + a_dim, mask=is_query | is_key | is_value, other=0.0)
    raw_b = tl.load(qkv + at + b_dim, mask=is_query | is_key | is_value, other=0.0)
    # Of a key, the value of its position; of a value, itself.
    of = tl.where(head < HEADS + KV_HEADS, at + KV_HEADS * (2 * HALF), at)
    stored_a = tl.load(qkv + of + a_dim, mask=is_key | is_value, other=0.0)
    stored_b = tl.load(qkv + of + b_dim, mask=is_key | is_value, other=0.0)
    unknown = not_finite(tl.maximum(magnitude(stored_a.to(tl.float32)), magnitude(stored_b.to(tl.float32))))
    a = raw_a.to(tl.float32)
    b = raw_b.to(tl.float32)
    if NORM:
        factor = inverse_rms(tl.sum(a * a + b * b, 1), 2 * HALF, eps)[:, None]
        at = head * (2 * HALF)
        normed = is_query | is_key
        if VALUES:
            normed = normed | is_value
        weight_a = tl.load(weight + at + a_dim, mask=normed, other=0.0).to(tl.float32)
        weight_b = tl.load(weight + at + b_dim, mask=normed, other=0.0).to(tl.float32)
        a *= factor
        b *= factor
        if not ONCE:
            a = rounded(a, raw_a, INTERPRETED)
            b = rounded(b, raw_b, INTERPRETED)
        a = rounded(a * weight_a, raw_a, INTERPRETED)
        b = rounded(b * weight_b, raw_b, INTERPRETED)
    value_a = raw_a
    value_b = raw_b
    if VALUES:
        value_a = a.to(raw_a.dtype)
        value_b = b.to(raw_b.dtype)
    value_a = tl.where(unknown, 0.0, value_a)
    value_b = tl.where(unknown, 0.0, value_b)
    at = token * ROTATED + lane
    cos_a = tl.load(cos + at, mask=turns, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + at + ROTATED // 2, mask=turns, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + at, mask=turns, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + at + ROTATED // 2, mask=turns, other=0.0).to(tl.float32)
    turned_a = rounded(a * cos_a, raw_a, INTERPRETED) + rounded(b * sin_a, raw_a, INTERPRETED)
    turned_b = rounded(b * cos_b, raw_b, INTERPRETED) + rounded(a * sin_b, raw_b, INTERPRETED)
    if ROTATED < 2 * HALF:
        turned_a = tl.where(turns, turned_a, a)
        turned_b = tl.where(turns, turned_b, b)
    turned_a = rounded(tl.where(unknown, float("nan"), turned_a), raw_a, INTERPRETED).to(raw_a.dtype)
    turned_b = rounded(tl.where(unknown, float("nan"), turned_b), raw_b, INTERPRETED).to(raw_b.dtype)
    at = (token * HEADS + head) * (2 * HALF)
    tl.store(q + at + a_dim, turned_a, mask=is_query)
    tl.store(q + at + b_dim, turned_b, mask=is_query)
    at = cell * KV_HEADS + head - HEADS
    if FLOAT8:
        # Bytes of keys in the heads of keys, of values in those of values.
        key_heads = (head >= HEADS) & (head < HEADS + KV_HEADS)
        value_heads = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
        wide_a = tl.where(value_heads, value_a, turned_a).to(tl.float32)
        wide_b = tl.where(value_heads, value_b, turned_b).to(tl.float32)
        largest = tl.max(tl.maximum(magnitude(wide_a), magnitude(wide_b)), 1)
        exponent = exponent_of(largest)[:, None]
        tl.store(key_scales + at, exponent.to(tl.uint8), mask=key_heads)
        tl.store(value_scales + at - KV_HEADS, exponent.to(tl.uint8), mask=value_heads)
        turned_a = tl.where(exponent == 255, 0, shrunk(wide_a, exponent, raw_a))
        turned_b = tl.where(exponent == 255, 0, shrunk(wide_b, exponent, raw_b))
        value_a = turned_a
        value_b = turned_b
    at *= 2 * HALF
    tl.store(keys + at + a_dim, turned_a, mask=is_key)
    tl.store(keys + at + b_dim, turned_b, mask=is_key)
    at -= KV_HEADS * (2 * HALF)
    tl.store(values + at + a_dim, value_a, mask=is_value)
    tl.store(values + at + b_dim, value_b, mask=is_value)


def rotate_and_store(
    qkv: torch.Tensor,
    norm: HeadNorm | None,
    rotary: Rotary | None,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    shared: bool = False,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Norm and rotate the queries and keys of ``qkv``; write keys and values to the pool.

    Reads nothing back from the device, and the grid follows from qkv's shape. If several tokens have the same
    cell (padding has), an arbitrary one is kept. Raises ValueError if the shapes do not fit or the pool is
    not contiguous.

    Args:
        qkv: [T, num_heads + 2 * num_kv_heads, head_dim], float32, float16 or bfloat16, as all tensors here.
        norm: norm of each head's query and key, and value if it has weights for it; or None.
        rotary: rotary factors at the tokens' positions, for the whole head or its first part; None: nothing
            is rotated.
        keys, values: [pages, page_size, num_kv_heads, head_dim], contiguous.
        slot_mapping: [T] cells, any integer type.
        shared: ``qkv`` has queries only, [T, num_heads, head_dim]; nothing is written.
        scales: of a pool of 8 bits, written with the keys and values.

    Returns:
        The queries, [T, num_heads, head_dim].
    """
    tokens, total, head_dim = qkv.shape
    kv_heads = 0 if shared else keys.shape[2]
    heads = total - 2 * kv_heads
    if not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("the pool must be contiguous")
    if head_dim % 2 or heads < 1 or keys.shape[3] != head_dim:
        raise ValueError(f"a projection {tuple(qkv.shape)} does not fit a pool {tuple(keys.shape)}")
    qkv = qkv.contiguous()
    # Without a rotation the tables are not read.
    cos, sin = (qkv, qkv) if rotary is None else (rotary.cos.contiguous(), rotary.sin.contiguous())
    rotated = 0 if rotary is None else cos.shape[-1]
    if rotated % 2 or not (rotary is None or 2 <= rotated <= head_dim):
        raise ValueError(f"{rotated} dimensions of heads of {head_dim} cannot be rotated")
    weight = qkv if norm is None else norm.weight.contiguous()
    values_too = norm is not None and kv_heads > 0 and len(weight) == total
    q = torch.empty((tokens, heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    block_d = triton.next_power_of_2(head_dim // 2)
    block_h = min(max(1, _TILE // (2 * block_d)), triton.next_power_of_2(total))
    early = launches_early(qkv.device)
    _rotate_kernel[(tokens, triton.cdiv(total, block_h))](
        qkv, weight, cos, sin, slot_mapping, q, *kv_arguments(keys, values, scales),
        0.0 if norm is None else norm.eps,
        HEADS=heads, KV_HEADS=kv_heads, BLOCK_H=block_h, HALF=head_dim // 2, ROTATED=rotated,
        BLOCK_D=block_d, NORM=norm is not None, VALUES=values_too, ONCE=weight.dtype != qkv.dtype,
        INTERPRETED=INTERPRETED, FLOAT8=scales is not None, EARLY=early, launch_pdl=early,
        # With fusion the compiler replaces torch's two operations by one multiply-add, which is rounded once.
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return q
