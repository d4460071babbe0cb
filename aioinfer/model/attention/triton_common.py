"""Shared by the Triton kernels: one step of attention with running softmax over a tile of paged keys.

A program holds a tile of M queries (tokens x heads of one KV head's group, packed so that the matrix unit
is filled even with one token) and iterates over its row's keys, BLOCK_N positions at a time:

    scores[M, N] = q[M, D] . k[N, D]^T           new peak = max(peak, scores)
    total = total * 2^(peak - new) + sum 2^(scores - new)
    acc[M, D] = acc * 2^(peak - new) + 2^(scores - new) . v[N, D]

This is the running softmax of Milakov and Gimelshein (arXiv 1805.02867) as FlashAttention-2 uses it (Dao,
arXiv 2307.08691), in base 2 because the hardware's exponential is. Pages are those of PagedAttention (Kwon
et al., arXiv 2309.06180); vLLM's unified Triton kernel (arXiv 2511.11581) packs tokens and heads into one
tile in this way.

Tiles begin at multiples of BLOCK_N counted from position 0 of the sequence, in any row and batch:
a query is multiplied with the same keys in the same groups in any batch and under any chunking. Whether a
tile is masked depends on the other queries, so the arithmetic must not: what is fused is written as ``fma``,
and kernels are compiled without ``enable_fp_fusion``, with which the compiler fuses where no mask lies
between a product and a sum. Cells that no query of the tile attends to are not read at all: values of other
requests there may be NaN.

Under ``TRITON_INTERPRET=1``, set before triton is first imported, the kernels run in Python on CPU
tensors. The interpreter stores bfloat16 as raw bits and cannot multiply it, so operands are widened there;
products of bfloat16 values are exact in float32, hence the arithmetic is that of the hardware.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from aioinfer.model.attention.pool import KVScales
from aioinfer.model.triton_float8 import decoded, power_of_two
from aioinfer.model.triton_support import interpreted

__all__ = [
    "INTERPRETED",
    "attend_tile",
    "check_layout",
    "follow",
    "inverse_rms",
    "kv_arguments",
    "mean_of_parts",
    "normalized",
    "rounded",
    "score_factors",
    "scratch",
    "tile_dim",
]


@triton.jit
def follow(EARLY: tl.constexpr) -> None:
    """With EARLY, programmatic dependent launch: let the next kernel be launched, and wait until the one
    before is complete. Every kernel that is launched in this way begins with it, since the next one waits for
    this one alone; one that is launched as usual waits for all."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def not_finite(magnitudes: tl.tensor) -> tl.tensor:
    """Which values, of which these are the magnitudes [heads, dims], are not finite: bool [heads, 1].

    They are stored as 0, under a key of NaN, so that the scores and results of queries that see the position
    are NaN. Others have a weight of 0 for it, and 0 * NaN is NaN. A key of 8 bits that is not finite is 0
    times infinity: 448 times infinity could be a score of minus infinity, which leaves the position out.
    """
    return (tl.max(magnitudes, 1) == float("inf"))[:, None]


@triton.jit
def _dot(a: tl.tensor, b: tl.tensor, acc: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """acc + a @ b, accumulated in float32; float32 operands are not rounded to TF32."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def _capped(scores: tl.tensor, inner: tl.tensor) -> tl.tensor:
    """tanh(scores * inner), from an exponential that cannot overflow."""
    scaled = scores * inner
    shrunk = tl.exp2(-2.8853900817779268 * tl.abs(scaled))  # exp(-2 |x|)
    tanh = (1.0 - shrunk) / (1.0 + shrunk)
    return tl.where(scaled < 0.0, -tanh, tanh)


@triton.jit
def _cell_offsets(
    table: tl.tensor, start: tl.tensor, key: tl.tensor, inside: tl.tensor,
    PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, STRIDE: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Offsets of the cells of positions ``key`` = start + [0, BLOCK_N), int64 [BLOCK_N].

    A tile within one page needs one look-up of the page table, other tiles one per position.
    """
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE_SIZE).to(tl.int64)
    else:
        page = tl.load(table + key // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
    return (page * PAGE_SIZE + key % PAGE_SIZE) * STRIDE


@triton.jit
def attend_tile(
    q: tl.tensor, acc: tl.tensor, peak: tl.tensor, total: tl.tensor,
    keys: tl.tensor, values: tl.tensor, key_scales: tl.tensor, value_scales: tl.tensor, table: tl.tensor,
    start: tl.tensor, first: tl.tensor, stop: tl.tensor, low: tl.tensor, high: tl.tensor,
    inner: tl.tensor, outer: tl.tensor,
    STRIDE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr, SOFT_CAP: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr,
    FLOAT8: tl.constexpr, NATIVE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Attention of ``q`` [M, BLOCK_D] to positions [start, start + BLOCK_N): the new (acc, peak, total).

    ``keys`` and ``values`` point at the KV head of a contiguous pool whose cells are STRIDE elements apart,
    ``table`` at the row's page table. Query m attends to [low[m], high[m]); [first, stop) covers all queries,
    and nothing else is read. Without MASKED every query attends to the whole tile. With FLOAT8 keys and
    values are bytes of e4m3, and the scales, at the KV head, too, are the exponents of their factors.
    """
    key = start + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_D)
    inside = (key >= first) & (key < stop)
    cells = _cell_offsets(table, start, key, inside, PAGE_SIZE, BLOCK_N, STRIDE)
    offsets = cells[:, None] + dim[None, :]
    if MASKED:
        wanted = inside[:, None] & (dim < HEAD_DIM)[None, :]
        k = tl.load(keys + offsets, mask=wanted, other=0.0)
        v = tl.load(values + offsets, mask=wanted, other=0.0)
    elif HEAD_DIM < BLOCK_D:
        wanted = (dim < HEAD_DIM)[None, :]
        k = tl.load(keys + offsets, mask=wanted, other=0.0)
        v = tl.load(values + offsets, mask=wanted, other=0.0)
    else:
        k = tl.load(keys + offsets)
        v = tl.load(values + offsets)
    if FLOAT8:
        at = cells // HEAD_DIM
        if MASKED:
            key_factor = power_of_two(tl.load(key_scales + at, mask=inside, other=0))
            value_factor = power_of_two(tl.load(value_scales + at, mask=inside, other=0))
        else:
            key_factor = power_of_two(tl.load(key_scales + at))
            value_factor = power_of_two(tl.load(value_scales + at))
        k = decoded(k, q, NATIVE)
        v = decoded(v, q, NATIVE)
        if q.dtype == tl.float16:
            # Its exponents do not reach down to the products of weights and factors.
            v = (v.to(tl.float32) * value_factor[:, None]).to(tl.float16)
    scores = _dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32), WIDEN)
    if FLOAT8:
        scores *= key_factor[None, :]
    if SOFT_CAP:
        scores = _capped(scores, inner)
    if MASKED:
        seen = (key[None, :] >= low[:, None]) & (key[None, :] < high[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    # The factor is positive: the largest product is that of the largest score.
    new_peak = tl.maximum(peak, tl.max(scores, 1) * outer)
    # -inf for a query without a key so far, where -inf minus -inf would be NaN.
    shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(tl.fma(scores, outer, -shift[:, None]))
    decay = tl.exp2(peak - shift)
    total = tl.fma(total, decay, tl.sum(weights, 1))
    if FLOAT8 and q.dtype != tl.float16:
        weights *= value_factor[None, :]
    acc = _dot(weights.to(v.dtype), v, acc * decay[:, None], WIDEN)
    return acc, new_peak, total


@triton.jit
def normalized(acc: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The weighted mean; zeros for a query without keys."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def mean_of_parts(
    weight: tl.tensor, value: tl.tensor, sinks: tl.tensor, head: tl.tensor, SINKS: tl.constexpr
) -> tl.tensor:
    """The mean [D] of parts ``value`` [S, D], whose weights are the powers of two of ``weight`` [S]; -inf and
    zeros for a part that is not there. With SINKS the head's sink takes a share."""
    peak = tl.max(weight, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        peak = tl.maximum(peak, sink)
    shift = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.exp2(weight - shift)
    total = tl.sum(weight, 0)
    if SINKS:
        total += tl.exp2(sink - shift)
    return tl.sum(value * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)


@triton.jit
def rounded(x: tl.tensor, like: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """``x``, float32, rounded to the nearest value of ``like``'s type, ties to even; still float32.

    Triton's interpreter truncates to bfloat16 instead, so there the rounding is done on the bits.
    """
    if INTERPRETED and like.dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        # The low bits of a NaN that came from bfloat16 are zeros: the addition does not change it.
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return x.to(like.dtype).to(tl.float32)


@triton.jit
def inverse_rms(total: tl.tensor, count: tl.constexpr, eps: tl.tensor) -> tl.tensor:
    """1 / sqrt(mean + eps) of ``count`` squares that sum to ``total``, each step rounded to the nearest.

    Triton's own divisions and roots are approximations, and differ between devices.
    """
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(total, count * 1.0) + eps))


#: whether kernels run in Triton's interpreter, on CPU tensors
INTERPRETED = interpreted()


def score_factors(scale: float, soft_cap: float | None) -> tuple[float, float]:
    """(inner, outer) such that ``outer * f(inner * q.k)`` is the score in base 2, f being tanh or absent.

    Raises ValueError unless both are positive, which the running maximum takes for granted.
    """
    if scale <= 0 or (soft_cap is not None and soft_cap <= 0):
        raise ValueError(f"scale {scale} and soft cap {soft_cap} must be positive")
    if soft_cap is None:
        return 1.0, scale * math.log2(math.e)
    return scale / soft_cap, soft_cap * math.log2(math.e)


def kv_arguments(
    keys: torch.Tensor, values: torch.Tensor, scales: KVScales | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values and their scales as kernels take them; without scales, something in their place."""
    if scales is None:
        return keys, values, keys, values
    return keys.view(torch.uint8), values.view(torch.uint8), *scales


def scratch(parts: int, head_dim: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for ``parts`` partial results and their weights, float32."""
    memory = torch.empty(parts * (head_dim + 1), dtype=torch.float32, device=device)
    return memory[: parts * head_dim], memory[parts * head_dim :]


def tile_dim(head_dim: int) -> int:
    """Width of a tile that holds a head: a power of two, at least the minimum of a matrix product."""
    return max(16, 1 << (head_dim - 1).bit_length())


def check_layout(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Raise ValueError unless kernels can read q [T, heads, D] and a pool [pages, size, kv_heads, D]."""
    if q.stride(2) != 1 or not (keys.is_contiguous() and values.is_contiguous()):
        raise ValueError("heads and the pool must be contiguous")
    if q.shape[1] % keys.shape[2] or q.shape[2] != keys.shape[3]:
        raise ValueError(f"queries {tuple(q.shape)} do not fit keys {tuple(keys.shape)}")
