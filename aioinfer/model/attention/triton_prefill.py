"""Prefill and extend: packed rows of any length over paged contexts, causal or by diffusion blocks.

Queries of a row and the heads of one KV head's group make tiles of BLOCK_M = BLOCK_Q tokens x heads. A query
attends to everything up to the end of its own block of ``block`` positions, counted from the start of the
sequence: with 1 that is causal attention, with a diffusion model's block size every token of a block attends
to the whole block (block diffusion, Arriola et al., arXiv 2503.09573) as far as it is written. A row's
queries are the last of its positions; a decode is a row of one query:

                    keys 0 1 2 3 | 4 5 6 7 | 8 9            row with kv_len 10, q_len 4
    query 6, block 1:    x x x x   x x x                     block 4:  x x x x   x x x x
          7              x x x x   x x x x                             x x x x   x x x x
          8              x x x x   x x x x   x                         x x x x   x x x x   x x
          9              x x x x   x x x x   x x                       x x x x   x x x x   x x

The tiles of all rows are numbered so that a program finds its row by bisection in ``cu_q``: row r begins
at tile ``cu_q[r] // BLOCK_Q + r``, which reserves enough tiles because a sum of floors, plus one per row, is
no less than the sum of ceilings. So the grid follows from the numbers of tokens and rows, and nothing is read
back from the device (as in vLLM's kernel, arXiv 2511.11581). The last tiles, which have the longest contexts,
start first.

A few tiles, as a block of a diffusion model has, leave most of a device idle while they go through a long
context. :func:`choose_splits` then has the keys of each tile divided evenly among several programs, whose
means a second kernel combines (as in Flash-Decoding; see :mod:`~aioinfer.model.attention.triton_decode`)::

    keys of a tile         first ........ | ............ | ..... stop
    programs (tile, head)     split 0     |   split 1    |  split 2
                              partial[0], lse[0]  [1]       [2]   ->  out
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from aioinfer.model.attention.pool import KVScales
from aioinfer.model.attention.triton_common import (
    INTERPRETED,
    attend_tile,
    check_layout,
    kv_arguments,
    mean_of_parts,
    normalized,
    score_factors,
    scratch,
    tile_dim,
)
from aioinfer.model.triton_float8 import float8_native
from aioinfer.model.triton_support import compute_capability

__all__ = ["MOST_SPLITS", "PrefillTuning", "choose_splits", "paged_prefill"]

#: the most programs among which the keys of a tile are divided, a power of two
MOST_SPLITS = 32
#: how many times as many programs as a launch should have it may have, if most of them find nothing to do
_MOST_LAUNCHED = 8


@dataclass(frozen=True, slots=True)
class PrefillTuning:
    """Sizes of the launch. ``block_n`` changes the order of additions, hence the last bits."""

    #: queries per tile, tokens times heads; a power of two, at least 16
    block_m: int = 128
    #: positions per tile, a power of two, at least 16
    block_n: int = 64
    num_warps: int = 8
    num_stages: int = 3
    #: programs that a launch should have: if tiles are fewer, their keys are divided. Two for each
    #: multiprocessor of an H200
    programs: int = 264
    #: the fewest positions of a context that are worth a program of their own
    split_size: int = 256

    def __post_init__(self) -> None:
        for size in (self.block_m, self.block_n):
            if size < 16 or size & (size - 1):
                raise ValueError(f"{size} is no size of a tile")

    @classmethod
    def of(cls, head_dim: int, dtype: torch.dtype, capability: tuple[int, int]) -> PrefillTuning:
        """Tiles that compile without spills in the shared memory of the device.

        Hopper multiplies by wgmma, whose operands lie in shared memory, of which there are 227 KiB; those of
        other GPUs take registers, and some have 99 KiB.
        """
        if dtype.itemsize == 4:
            # Without a matrix unit: small enough for the registers.
            few = cls(block_m=16, block_n=16, num_warps=4)
            return cls(block_m=32, block_n=16) if capability[0] == 9 else few
        # What masks the rest of a tile takes registers, too.
        padded = head_dim > 64 and tile_dim(head_dim) > head_dim
        if capability[0] == 9:
            if head_dim > 128:
                return cls(block_m=64, block_n=32)
            return cls(block_n=32) if padded else cls()
        if head_dim > 128:
            return cls(block_m=64, block_n=32, num_stages=2)
        if padded or (head_dim > 64 and capability[0] > 9):
            return cls(block_m=64, block_n=32)
        return cls(block_n=32) if head_dim > 64 else cls()

    @classmethod
    def of_float8(cls, head_dim: int, dtype: torch.dtype) -> PrefillTuning:
        """Tuning for keys and values of 8 bits, which take registers where they are widened: no spills with
        heads of up to 256 on sm_80 to sm_120, in 56 KiB of shared memory."""
        if dtype.itemsize == 4:
            return cls(block_m=32, block_n=16)
        if dtype == torch.float16 and head_dim <= 64:
            # Its values are multiplied where they are widened, and a small head is in few threads.
            return cls(block_m=64, block_n=32)
        return cls(block_m=32 if head_dim > 128 else 64)


@triton.jit
def _find_row(cu_q: tl.tensor, tile: tl.tensor, num_rows: tl.tensor, BLOCK_Q: tl.constexpr) -> tl.tensor:
    """The last row that begins at ``tile`` or before."""
    origin = tl.load(cu_q)
    low = num_rows * 0
    high = num_rows
    while low < high:
        middle = (low + high) // 2
        begins = (tl.load(cu_q + middle) - origin) // BLOCK_Q + middle <= tile
        low = tl.where(begins, middle + 1, low)
        high = tl.where(begins, high, middle)
    return low - 1


@triton.jit
def _reach(
    begin: tl.tensor, last: tl.tensor, position: tl.tensor, valid: tl.tensor, length: tl.tensor,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
) -> tuple[tl.tensor, ...]:  # fmt: skip
    """The positions that queries at ``position``, between ``begin`` and ``last``, attend to in a row of
    ``length``: (first, whole, stop, low, high).

    Query m attends to [low[m], high[m]), all queries together to [first, stop), and every query to the whole
    of each tile that begins in [first, whole). All ranges of a padding row, with length 0, are empty.
    """
    high = tl.where(valid, tl.minimum((position // BLOCK + 1) * BLOCK, length), 0)
    low = high * 0
    first = length * 0
    whole = tl.maximum(tl.minimum((begin // BLOCK + 1) * BLOCK, length), 0) // BLOCK_N * BLOCK_N
    stop = tl.minimum((last // BLOCK + 1) * BLOCK, length)
    if WINDOW > 0:
        low = tl.maximum(position - WINDOW + 1, 0)
        first = tl.maximum(begin - WINDOW + 1, 0)
        whole = first // BLOCK_N * BLOCK_N
    return first, whole, stop, low, high


# Arguments whose alignment or value changes from step to step must not select another compilation.
@triton.jit(
    do_not_specialize=[
        *("table", "cu_q", "kv_len", "sinks", "partial", "lse", "num_rows", "num_tokens", "stride_table")
    ]
)
def _prefill_kernel(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, key_scales: tl.tensor, value_scales: tl.tensor,
    table: tl.tensor, cu_q: tl.tensor, kv_len: tl.tensor,
    sinks: tl.tensor, out: tl.tensor, partial: tl.tensor, lse: tl.tensor,
    inner: tl.tensor, outer: tl.tensor, num_rows: tl.tensor, num_tokens: tl.tensor,
    stride_table: tl.tensor,
    stride_q_token: tl.tensor, stride_q_head: tl.tensor,
    stride_out_token: tl.tensor, stride_out_head: tl.tensor,
    GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    STRIDE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, WIDEN: tl.constexpr,
    FLOAT8: tl.constexpr, NATIVE: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_Q tokens of one row, for up to HEADS heads of a KV head's group, and one split of their keys.

    Grid (tiles, KV heads x blocks of their group, splits). Query m is token m // HEADS of the tile and head
    m % HEADS of the block of heads. With several splits, which is no compilation of its own, writes
    ``partial`` float32 [splits, num_tokens, heads, HEAD_DIM], normalized, and ``lse`` [splits, num_tokens,
    heads], the base-2 logarithm of its weight, without the sinks.
    """
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // blocks
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = _find_row(cu_q, tile, num_rows, BLOCK_Q).to(tl.int64)
    origin = tl.load(cu_q + row)
    q_len = (tl.load(cu_q + row + 1) - origin).to(tl.int32)
    token = ((tile - (origin - tl.load(cu_q)) // BLOCK_Q - row) * BLOCK_Q).to(tl.int32)
    length = tl.load(kv_len + row).to(tl.int32)
    if token >= q_len:
        return
    lane = tl.arange(0, BLOCK_M)
    member = tl.program_id(1) % blocks * HEADS + lane % HEADS
    head = kv_head * GROUP + member
    tokens = token + lane // HEADS
    valid = (lane < BLOCK_Q * HEADS) & (member < GROUP) & (tokens < q_len)
    dim = tl.arange(0, BLOCK_D)
    wanted = valid[:, None] & (dim < HEAD_DIM)[None, :]
    at = (origin + tokens)[:, None] * stride_q_token + head[:, None] * stride_q_head + dim[None, :]
    queries = tl.load(q + at, mask=wanted, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    if SINKS:
        # Where keys are divided, whoever combines them sees to the sinks: they weigh 2^-inf here.
        sink = tl.load(sinks + head, mask=valid, other=0.0).to(tl.float32) * 1.4426950408889634
        peak = tl.where(splits == 1, sink, peak)
        total = tl.where(splits == 1, total + 1.0, total)
    first, whole, stop, low, high = _reach(
        length - q_len + token, length - q_len + tl.minimum(token + BLOCK_Q, q_len) - 1,
        length - q_len + tokens, valid, length, WINDOW, BLOCK, BLOCK_N,
    )  # fmt: skip
    keys += kv_head * HEAD_DIM
    values += kv_head * HEAD_DIM
    key_scales += kv_head
    value_scales += kv_head
    table += row * stride_table
    begin = first // BLOCK_N * BLOCK_N
    size = tl.cdiv(tl.cdiv(stop - begin, splits), BLOCK_N) * BLOCK_N
    begin += split * size
    stop_here = tl.minimum(begin + size, stop)
    # Tiles of keys without a mask, none if there is a window; then the others.
    if WINDOW == 0:
        for start in tl.range(begin, tl.minimum(whole, stop_here), BLOCK_N):
            acc, peak, total = attend_tile(
                queries, acc, peak, total, keys, values, key_scales, value_scales, table,
                start, first, stop, low, high, inner, outer,
                STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, SOFT_CAP, False, WIDEN, FLOAT8, NATIVE,
            )  # fmt: skip
    for start in tl.range(tl.maximum(whole, begin), stop_here, BLOCK_N):
        acc, peak, total = attend_tile(
            queries, acc, peak, total, keys, values, key_scales, value_scales, table,
            start, first, stop, low, high, inner, outer,
            STRIDE, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, SOFT_CAP, True, WIDEN, FLOAT8, NATIVE,
        )  # fmt: skip
    result = normalized(acc, total)
    if splits == 1:
        at = (origin + tokens)[:, None] * stride_out_token + head[:, None] * stride_out_head + dim[None, :]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=wanted)
    else:
        heads = tl.num_programs(1) // blocks * GROUP
        part = (split * num_tokens.to(tl.int64) + origin - tl.load(cu_q) + tokens) * heads + head
        if begin < stop:
            # Else it weighs nothing, and is not read.
            tl.store(partial + part[:, None] * HEAD_DIM + dim[None, :], result, mask=wanted)
        tl.store(lse + part, peak + tl.log2(tl.where(total == 0.0, 1.0, total)), mask=valid)


@triton.jit(do_not_specialize=["partial", "lse", "cu_q", "sinks", "num_rows", "num_tokens", "num_splits"])
def _combine_prefill_kernel(
    partial: tl.tensor, lse: tl.tensor, cu_q: tl.tensor, sinks: tl.tensor, out: tl.tensor,
    num_rows: tl.tensor, num_tokens: tl.tensor, num_splits: tl.tensor,
    stride_out_token: tl.tensor, stride_out_head: tl.tensor,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr, SINKS: tl.constexpr,
) -> None:  # fmt: skip
    """Combine the splits of one head of one token. Grid (heads, tokens)."""
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    origin = tl.load(cu_q)
    if token >= tl.load(cu_q + num_rows) - origin:
        return
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    part = (split * num_tokens.to(tl.int64) + token) * tl.num_programs(0) + head
    weight = tl.load(lse + part, mask=split < num_splits, other=float("-inf"))
    there = (weight > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :]
    value = tl.load(partial + part[:, None] * HEAD_DIM + dim[None, :], mask=there, other=0.0)
    result = mean_of_parts(weight, value, sinks, head, SINKS)
    at = out + (origin + token) * stride_out_token + head * stride_out_head + dim
    tl.store(at, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def choose_splits(
    num_tokens: int,
    num_rows: int,
    num_heads: int,
    kv_heads: int,
    longest: int,
    tuning: PrefillTuning,
    *,
    padded: bool = False,
) -> int:
    """Among how many programs the keys of each tile should be divided: 1 where there are tiles enough.

    Args:
        num_tokens, num_rows: of the launch, as of :func:`paged_prefill`.
        num_heads, kv_heads: heads of queries, and of keys.
        longest: the most positions that a query attends to, or a bound of them.
        padded: the device alone knows which rows have tokens, as in a captured step. One of them may have
            all, and the others tiles whose programs end at once: these are not counted, up to a limit.
    """
    tiles, blocks, _ = _tiles(num_tokens, num_rows, num_heads, kv_heads, tuning)
    busy, *_ = _tiles(num_tokens, 1 if padded else num_rows, num_heads, kv_heads, tuning)
    wanted = tuning.programs // max(1, busy * blocks)
    launched = _MOST_LAUNCHED * tuning.programs // max(1, tiles * blocks)
    return max(1, min(wanted, launched, longest // tuning.split_size, MOST_SPLITS))


def _tiles(
    num_tokens: int, num_rows: int, num_heads: int, kv_heads: int, tuning: PrefillTuning
) -> tuple[int, int, int]:
    """(tiles of all rows at most, blocks of heads, heads of a block)."""
    group = num_heads // kv_heads
    heads = min(group, tuning.block_m)
    return num_tokens // (tuning.block_m // heads) + num_rows, kv_heads * -(-group // heads), heads


def paged_prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    cu_q: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    num_tokens: int,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    block: int = 1,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tuning: PrefillTuning | None = None,
    splits: int = 1,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Attention of packed rows, each the last positions of its sequence, over keys and values in the pool.

    With one split, a query's bits depend neither on the batch nor on the chunking of its sequence. Scratch
    memory of several comes from torch's allocator. Raises ValueError if the shapes do not fit or the tensors
    are not contiguous.

    Args:
        q: [T, num_heads, head_dim], heads contiguous; float32, float16 or bfloat16.
        keys, values: [pages, page_size, num_kv_heads, head_dim], of q's type, or e4m3 with ``scales``.
        block_table: [R, P] pages of each row, any integer type.
        cu_q: [R + 1] row r owns tokens [cu_q[r], cu_q[r + 1]) of q; need not begin with 0.
        kv_len: [R] positions of each row, its queries included; 0 marks padding, whose output is 0.
        num_tokens: at least ``cu_q[R] - cu_q[0]``, on the host.
        scale: factor of the dot products.
        window: length of a sliding window in positions, None for none; see
            :class:`~aioinfer.model.attention.base.AttentionParams` for this and the next two.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2, arXiv 2408.00118).
        block: length of a diffusion block; 1 is causal.
        sinks: [num_heads], see :class:`~aioinfer.model.attention.base.Attention`.
        out: where to write, [T, num_heads, head_dim]; tokens of no row are not written.
        splits: among how many programs the keys of a tile are divided, up to :data:`MOST_SPLITS`; see
            :func:`choose_splits`.
        scales: of keys and values of 8 bits; None for others.

    Returns:
        [T, num_heads, head_dim]
    """
    check_layout(q, keys, values)
    rows, (_, num_heads, head_dim) = len(kv_len), q.shape
    page_size, kv_heads = keys.shape[1:3]
    tuning = tuning or PrefillTuning.of(head_dim, q.dtype, compute_capability(q.device))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if rows == 0 or num_tokens == 0:
        return out
    if not 1 <= splits <= MOST_SPLITS:
        raise ValueError(f"splits are 1 to {MOST_SPLITS}, not {splits}")
    group, block_d = num_heads // kv_heads, tile_dim(head_dim)
    tiles, blocks, heads = _tiles(num_tokens, rows, num_heads, kv_heads, tuning)
    partial, lse = scratch(splits * num_tokens * num_heads if splits > 1 else 0, head_dim, q.device)
    inner, outer = score_factors(scale, soft_cap)
    _prefill_kernel[(tiles, blocks, splits)](
        q, *kv_arguments(keys, values, scales), block_table, cu_q, kv_len,
        kv_len if sinks is None else sinks, out, partial, lse,
        inner, outer, rows, num_tokens,
        block_table.stride(0), *q.stride()[:2], *out.stride()[:2],
        GROUP=group, HEADS=heads, BLOCK_Q=tuning.block_m // heads, BLOCK_M=tuning.block_m, HEAD_DIM=head_dim,
        BLOCK_D=block_d, BLOCK_N=tuning.block_n, PAGE_SIZE=page_size, STRIDE=kv_heads * head_dim,
        WINDOW=window or 0, BLOCK=block, SOFT_CAP=soft_cap is not None,
        SINKS=sinks is not None, WIDEN=INTERPRETED,
        FLOAT8=scales is not None, NATIVE=scales is not None and float8_native(q.device),
        num_warps=tuning.num_warps, num_stages=tuning.num_stages,
        # A token has the same bits where its tile is masked and where it is not, see triton_common.
        enable_fp_fusion=False,
    )  # fmt: skip
    if splits > 1:
        _combine_prefill_kernel[(num_heads, num_tokens)](
            partial, lse, cu_q, kv_len if sinks is None else sinks, out, rows, num_tokens, splits,
            *out.stride()[:2],
            HEAD_DIM=head_dim, BLOCK_D=block_d, BLOCK_S=MOST_SPLITS, SINKS=sinks is not None,
            num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return out
