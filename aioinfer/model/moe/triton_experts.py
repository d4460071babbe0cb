"""Experts by four Triton kernels, one of which sorts, for steps of any size.

A step of T tokens has P = T * top_k pairs of a token and an expert. The rows of a matrix product share their
weights, so pairs are put into blocks of one expert each (the block alignment of vLLM's and SGLang's fused
mixture of experts):

    experts of the pairs   2 0 2 | 0 2 2 | 0 2 2         top_k = 3, BLOCK_M = 4
    blocks                 [1 3 6 .] [       ] [0 2 4 5] [7 8 . .]
    expert of each block       0        -1         2         2           -1: no work

    act[P, middle]      = silu(hidden . gate^T) * (hidden . up^T)        programs (block, columns)
    partial[P, hidden]  = act . down^T                                   programs (block, columns)
    out[T, hidden]      = sum over a token's pairs of weight * partial   programs (token, columns)

At decode sizes an expert has a handful of tokens, and reading the weights of the chosen experts determines
the time: each is read once, by blocks as small as the matrix unit allows.

Nothing is read back. The grids follow from T, top_k and the number of experts, so that launches can be
captured in a CUDA graph; a program without a block exits. No two programs write to the same address. All
tiles of a tuning add in the same order in every step, and the rows of a tile are independent: given its
experts and weights, a token's bits depend on the tuning alone.

Weights of 8 bits are widened on their way, and the first operand of a product, as in
:mod:`aioinfer.model.triton_float8`: what is added up is the transpose of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from aioinfer.checkpoint.tensors import Float8Matrix
from aioinfer.model.attention.triton_common import INTERPRETED
from aioinfer.model.float8 import too_narrow
from aioinfer.model.moe.experts import ExpertWeights, Float8ExpertWeights
from aioinfer.model.triton_float8 import decoded, float8_native

__all__ = ["ExpertTuning", "TritonExperts", "align", "fused_experts", "num_blocks"]

#: pairs that the sorting kernel loads at a time
_SORTED = 1024


@dataclass(frozen=True, slots=True)
class ExpertTuning:
    """Tile sizes of the products. Of them only ``block_k`` changes the last bits of the results."""

    #: tokens of a tile, a power of two, at least 16
    block_m: int = 16
    #: rows of weights of a tile; in the first product one half is of gate, the other of up
    block_n: int = 64
    #: inner dimensions of a tile
    block_k: int = 128
    num_warps: int = 4
    num_stages: int = 4

    def __post_init__(self) -> None:
        sizes = (self.block_m, self.block_n // 2, self.block_k)
        if any(size < 16 or size & (size - 1) for size in sizes):
            raise ValueError(f"tiles of {self.block_m} x {self.block_n} x {self.block_k}")

    @classmethod
    def of(cls, dtype: torch.dtype, pairs: int, num_experts: int) -> ExpertTuning:
        """Small tiles for few tokens per expert; from 32 on, where small tiles would read the weights several
        times, tiles that fill the matrix unit of Hopper. ``pairs`` is known on the host. With weights of 8
        bits the tiles are the same."""
        if dtype.itemsize == 4:
            return cls(block_k=32, num_stages=3)
        if pairs < 32 * num_experts:
            return cls()
        return cls(block_m=64, block_n=128, block_k=64)


class TritonExperts:
    """Experts by Triton kernels."""

    __slots__ = ("_tuning", "invariant", "stack")

    def __init__(
        self, stack: ExpertWeights, *, tuning: ExpertTuning | None = None, invariant: bool = False
    ) -> None:
        """``tuning`` applies to steps of all sizes; None selects one by the size of the step, or, if
        ``invariant``, that of small ones for all: a token's bits then do not depend on the step."""
        self.stack = stack
        self._tuning = tuning
        self.invariant = invariant or tuning is not None

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        pairs = 0 if self.invariant else experts.numel()
        tuning = self._tuning or ExpertTuning.of(hidden.dtype, pairs, len(self.stack.down))
        return fused_experts(hidden, self.stack, weights, experts, tuning)


@triton.jit
def _first_block(below: tl.tensor, expert: tl.tensor, BLOCK_M: tl.constexpr) -> tl.tensor:
    """The first block of an expert, if ``below`` pairs belong to the experts before it: the most blocks that
    those can fill, since the last block of each may be partly empty."""
    return (below + tl.minimum(below, expert) * (BLOCK_M - 1)) // BLOCK_M


@triton.jit(do_not_specialize=["ids", "pairs", "blocks"])
def _align_kernel(
    ids: tl.tensor, block_expert: tl.tensor, block_pairs: tl.tensor, pairs: tl.tensor, blocks: tl.tensor,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Gather the pairs of one expert, in their order. Grid (EXPERTS,).

    Writes the expert to ``block_expert`` [blocks] for its blocks, and -1 up to the first block of the next
    expert; and the pairs to ``block_pairs`` [blocks, BLOCK_M], padded with the number ``pairs``.
    """
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    below = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, pairs, BLOCK):
        found = tl.load(ids + start + lane, mask=start + lane < pairs, other=EXPERTS)
        below += ((found >= 0) & (found < expert)).to(tl.int32)
        own += (found == expert).to(tl.int32)
    before = tl.sum(below, 0)
    count = tl.sum(own, 0)
    first = _first_block(before, expert, BLOCK_M)
    last = first + tl.cdiv(count, BLOCK_M)
    # The last expert fills all remaining blocks.
    next_first = tl.where(expert == EXPERTS - 1, blocks, _first_block(before + count, expert + 1, BLOCK_M))
    for start in tl.range(first, next_first, BLOCK):
        block = start + lane
        tl.store(block_expert + block, tl.where(block < last, expert, -1), mask=block < next_first)
    origin = block_pairs + first * BLOCK_M
    done = count * 0
    for start in tl.range(0, pairs, BLOCK):
        found = tl.load(ids + start + lane, mask=start + lane < pairs, other=EXPERTS)
        mine = (found == expert).to(tl.int32)
        tl.store(origin + done + tl.cumsum(mine, 0) - 1, start + lane, mask=mine > 0)
        done += tl.sum(mine, 0)
    spare = count + tl.arange(0, BLOCK_M)
    tl.store(origin + spare, pairs, mask=spare < (last - first) * BLOCK_M)


@triton.jit
def _product(
    acc: tl.tensor, x: tl.tensor, rows: tl.tensor, factors: tl.tensor, at: tl.tensor,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, FLOAT8: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """acc [M, N] + x [M, K] . rows[N, at]^T, accumulated in float32, not in TF32. With FLOAT8 acc is [N, M];
    scales of blocks are in it, those of whole rows are not."""
    if SIZE % BLOCK_K == 0:
        w = tl.load(rows[:, None] + at[None, :])
    else:
        w = tl.load(rows[:, None] + at[None, :], mask=(at < SIZE)[None, :], other=0)
    if FLOAT8:
        w = decoded(w, x, NATIVE)
    if WIDEN:
        w = w.to(tl.float32)
    if not FLOAT8:
        acc = tl.dot(x, tl.trans(w), acc, input_precision="ieee")
    elif WIDTH >= SIZE:
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    else:
        acc += tl.dot(w, tl.trans(x), input_precision="ieee") * tl.load(factors)[:, None]
    return acc


@triton.jit
def _completed(acc: tl.tensor, factors: tl.tensor, SIZE: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """[M, N] of acc [N, M], the sums of products with weights of 8 bits, with all scales in it."""
    if WIDTH >= SIZE:
        acc *= tl.load(factors)[:, None]
    return tl.trans(acc)


@triton.jit
def _gated(acc: tl.tensor, up: tl.tensor, CLAMPED: tl.constexpr, GELU: tl.constexpr) -> tl.tensor:
    """silu(acc) * up, or with GELU or CLAMPED another gate's."""
    steep = acc
    if CLAMPED:
        acc = tl.minimum(acc, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, 7.0, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -7.0, propagate_nan=tl.PropagateNan.ALL) + 1.0
        steep = 1.702 * acc
    if GELU:
        # (1 + tanh(u)) / 2 is the sigmoid of 2u
        steep = 1.5957691216057308 * (acc + 0.044715 * acc * acc * acc)
    # the sigmoid from an exponential that cannot overflow
    shrunk = tl.exp(-tl.abs(steep))
    return acc * tl.where(steep < 0.0, shrunk, 1.0) / (1.0 + shrunk) * up


@triton.jit(do_not_specialize=["pairs"])
def _product_kernel(
    x: tl.tensor, w: tl.tensor, scales: tl.tensor, bias: tl.tensor, out: tl.tensor,
    block_expert: tl.tensor, block_pairs: tl.tensor, pairs: tl.tensor, stride_x: tl.tensor,
    SHARED_BY: tl.constexpr, SIZE: tl.constexpr, COLUMNS: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, FLOAT8: tl.constexpr, NATIVE: tl.constexpr,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, GELU: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N columns of one block of pairs. Grid (blocks, column blocks): blocks of an expert that read the
    same weights run at the same time.

    x is [pairs / SHARED_BY, SIZE], one row for SHARED_BY consecutive pairs; out is [pairs, COLUMNS]; w is
    [experts, COLUMNS, SIZE], or with GATED [experts, 2 * COLUMNS, SIZE], gate and up, and out is
    silu(gate) * up, or with GELU or CLAMPED another gate's. With BIAS bias is the last but without SIZE. With
    FLOAT8 w is bytes of e4m3, and each HEIGHT rows and WIDTH columns of an expert have one of the scales.
    """
    block = tl.program_id(0)
    expert = tl.load(block_expert + block)
    if expert < 0:
        return
    pair = tl.load(block_pairs + block * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    valid = pair < pairs
    # Rows and columns out of range repeat the work of valid ones and are not stored.
    origins = x + tl.where(valid, pair, 0) // SHARED_BY * stride_x
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    clamped = tl.minimum(column, COLUMNS - 1)
    sheets: tl.constexpr = 2 if GATED else 1
    rows = w + (expert.to(tl.int64) * (sheets * COLUMNS) + clamped) * SIZE
    groups: tl.constexpr = (SIZE + WIDTH - 1) // WIDTH
    factors = scales + expert.to(tl.int64) * ((sheets * COLUMNS + HEIGHT - 1) // HEIGHT * groups)
    of_acc = factors + clamped // HEIGHT * groups
    of_up = factors + (COLUMNS + clamped) // HEIGHT * groups
    acc = tl.zeros([BLOCK_N, BLOCK_M] if FLOAT8 else [BLOCK_M, BLOCK_N], tl.float32)
    up = acc
    for start in tl.range(0, SIZE, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        if SIZE % BLOCK_K == 0:
            tile = tl.load(origins[:, None] + at[None, :])
        else:
            tile = tl.load(origins[:, None] + at[None, :], mask=(at < SIZE)[None, :], other=0.0)
        if WIDEN:
            tile = tile.to(tl.float32)
        group = start // WIDTH
        acc = _product(acc, tile, rows, of_acc + group, at, SIZE, WIDTH, FLOAT8, NATIVE, BLOCK_K, WIDEN)
        if GATED:
            other = rows + COLUMNS * SIZE
            up = _product(up, tile, other, of_up + group, at, SIZE, WIDTH, FLOAT8, NATIVE, BLOCK_K, WIDEN)
    if FLOAT8:
        acc = _completed(acc, of_acc, SIZE, WIDTH)
        if GATED:
            up = _completed(up, of_up, SIZE, WIDTH)
    if BIAS:
        first = bias + expert.to(tl.int64) * (sheets * COLUMNS) + clamped
        acc += tl.load(first).to(tl.float32)[None, :]
        if GATED:
            up += tl.load(first + COLUMNS).to(tl.float32)[None, :]
    if GATED:
        acc = _gated(acc, up, CLAMPED, GELU)
    to = out + pair[:, None] * COLUMNS + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=valid[:, None] & (column < COLUMNS)[None, :])


@triton.jit
def _sum_kernel(
    partial: tl.tensor, weights: tl.tensor, out: tl.tensor,
    TOP_K: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """The weighted sum of a token's pairs, in float32 and in their order. Grid (tokens, column blocks)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < COLUMNS
    total = tl.zeros([BLOCK], tl.float32)
    for pair in tl.static_range(TOP_K):
        weight = tl.load(weights + token * TOP_K + pair).to(tl.float32)
        value = tl.load(partial + (token * TOP_K + pair) * COLUMNS + column, mask=inside, other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(out + token * COLUMNS + column, total.to(out.dtype.element_ty), mask=inside)


def num_blocks(pairs: int, num_experts: int, block_m: int) -> int:
    """The most blocks that ``pairs`` can fill under any routing."""
    return (pairs + min(pairs, num_experts) * (block_m - 1)) // block_m


def align(experts: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Put pairs into blocks of one expert each, on the device.

    Args:
        experts: [P] or [T, top_k], any integer type, contiguous; pairs outside [0, num_experts) get no block.
        num_experts: number of experts.
        block_m: pairs of a block.

    Returns:
        the expert of each block, int32 [blocks], -1 for none; and its pairs, int32 [blocks, block_m], in
        ascending order, padded with P (undefined in a block without expert)
    """
    pairs = experts.numel()
    blocks = num_blocks(pairs, num_experts, block_m)
    block_expert = torch.empty(blocks, dtype=torch.int32, device=experts.device)
    block_pairs = torch.empty(blocks, block_m, dtype=torch.int32, device=experts.device)
    _align_kernel[(num_experts,)](
        experts, block_expert, block_pairs, pairs, blocks,
        EXPERTS=num_experts, BLOCK_M=block_m, BLOCK=_SORTED, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return block_expert, block_pairs


def fused_experts(
    hidden: torch.Tensor,
    stack: ExpertWeights | Float8ExpertWeights,
    weights: torch.Tensor,
    experts: torch.Tensor,
    tuning: ExpertTuning,
) -> torch.Tensor:
    """The sum that :class:`~aioinfer.model.moe.experts.Experts` defines; silu(gate) * up is rounded once.

    Raises ValueError if shapes do not fit or the experts are not contiguous.
    """
    gate_up, down = _Matrices.of(stack.gate_up), _Matrices.of(stack.down)
    biases = (gate_up.scales, down.scales) if stack.biases is None else stack.biases
    (tokens, size), top_k = hidden.shape, experts.shape[1]
    num_experts, _, middle = down.values.shape
    if gate_up.values.shape != (num_experts, 2 * middle, size) or down.values.shape[1] != size:
        raise ValueError(f"tokens {tuple(hidden.shape)} do not fit experts {tuple(gate_up.values.shape)}")
    if experts.shape != (tokens, top_k) or weights.shape != experts.shape:
        raise ValueError(f"{tokens} tokens, experts {tuple(experts.shape)}, weights {tuple(weights.shape)}")
    if not all(each.is_contiguous() for each in (*gate_up[:2], *down[:2], *biases)):
        raise ValueError("experts must be contiguous")
    out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    if tokens == 0:
        return out
    hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
    weights, experts = weights.contiguous(), experts.contiguous()
    block_expert, block_pairs = align(experts, num_experts, tuning.block_m)
    pairs, blocks = tokens * top_k, len(block_expert)
    act = torch.empty(pairs, middle, dtype=hidden.dtype, device=hidden.device)
    partial = torch.empty(pairs, size, dtype=hidden.dtype, device=hidden.device)
    launch = {
        "BIAS": stack.biases is not None, "BLOCK_M": tuning.block_m, "WIDEN": INTERPRETED,
        "num_warps": tuning.num_warps, "num_stages": tuning.num_stages, "enable_fp_fusion": True,
    }  # fmt: skip
    half = tuning.block_n // 2
    _product_kernel[(blocks, -(-middle // half))](
        hidden, gate_up.values, gate_up.scales, biases[0], act, block_expert, block_pairs, pairs,
        hidden.stride(0), SHARED_BY=top_k, SIZE=size, COLUMNS=middle,
        GATED=True, CLAMPED=stack.gate == "clamped_silu", GELU=stack.gate == "gelu_tanh",
        BLOCK_N=half, **gate_up.constants(tuning.block_k), **launch,
    )  # fmt: skip
    _product_kernel[(blocks, -(-size // tuning.block_n))](
        act, down.values, down.scales, biases[1], partial, block_expert, block_pairs, pairs, middle,
        SHARED_BY=1, SIZE=middle, COLUMNS=size, GATED=False, CLAMPED=False, GELU=False,
        BLOCK_N=tuning.block_n, **down.constants(tuning.block_k), **launch,
    )  # fmt: skip
    block = min(1024, triton.next_power_of_2(size))
    _sum_kernel[(tokens, -(-size // block))](
        partial, weights, out, TOP_K=top_k, COLUMNS=size, BLOCK=block, num_warps=4,
        enable_fp_fusion=True,
    )  # fmt: skip
    return out


class _Matrices(NamedTuple):
    """A matrix of each expert, as the kernel takes it."""

    #: [E, rows, inner]; of floats of 8 bits their bytes
    values: torch.Tensor
    #: scales of blocks; of plain weights the weights
    scales: torch.Tensor
    #: None: plain weights
    block: tuple[int, int] | None

    @classmethod
    def of(cls, given: torch.Tensor | Float8Matrix) -> _Matrices:
        """Raises ValueError if scales do not fit."""
        if isinstance(given, torch.Tensor):
            return cls(given, given, None)
        (count, rows, inner), (height, width) = given.values.shape, given.block
        fits = given.scales.shape == (count, -(-rows // height), -(-inner // width))
        if not fits or too_narrow(given.block, inner):
            raise ValueError(f"scales {tuple(given.scales.shape)} of blocks {given.block} do not fit experts")
        return cls(given.values.view(torch.uint8), given.scales, given.block)

    def constants(self, block_k: int) -> dict[str, int | bool]:
        """Constants of the kernel. ``block_k``: that of a tuning."""
        if self.block is None:
            return {"HEIGHT": 1, "WIDTH": 1, "FLOAT8": False, "NATIVE": False, "BLOCK_K": block_k}
        inner, (height, width) = self.values.shape[2], self.block
        while width < inner and width % block_k:
            block_k //= 2
        native = float8_native(self.values.device)
        width = min(width, inner)
        return {"HEIGHT": height, "WIDTH": width, "FLOAT8": True, "NATIVE": native, "BLOCK_K": block_k}
