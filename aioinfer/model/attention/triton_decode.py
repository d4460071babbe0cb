"""Decode: one query per row against a long paged context, the context split among programs.

With one token per row there is one tile of queries per (row, KV head): too few programs to fill a device
when the batch is small. So each row's context is cut into splits that are computed separately and combined
afterwards (Flash-Decoding, Dao et al., 2023, crfm.stanford.edu/2023/10/12/flashdecoding):

    positions of a row    0 ......... 255 | 256 ....... 511 | 512 .. 700        (window: begins later)
                              split 0           split 1         split 2
    programs (head, row, lane)   0                 1               0            each takes every n-th split
                           partial[0], lse[0]   [1]             [2]
    combine (head, row)          `---- weighted by 2^(lse - max lse) ----'  ->  out

The length of a split follows from the row's own length alone: ``split_size``, or as much more as makes
``max_splits`` suffice. Hence a row's bits do not depend on the batch. The grid follows from the shape of the
page table, so the launch can be captured in a CUDA graph whose lengths and page tables change on the device.

A graph is captured for the longest contexts, and most contexts are shorter: with one program per possible
split, most programs would have no work, and starting them takes time. So the splits of a row are shared by a
number of programs, called lanes, that falls as the number of rows grows.
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
    follow,
    kv_arguments,
    mean_of_parts,
    normalized,
    score_factors,
    scratch,
    tile_dim,
)
from aioinfer.model.triton_float8 import float8_native
from aioinfer.model.triton_support import launches_early

__all__ = ["DecodeTuning", "paged_decode"]


@dataclass(frozen=True, slots=True)
class DecodeTuning:
    """Sizes of the launches. The first three change the order of additions, hence the last bits."""

    #: the fewest positions of a split; a multiple of ``block_n``
    split_size: int = 256
    #: the most splits of a row; bounds the grid and the memory for partial results
    max_splits: int = 16
    #: positions per tile, a power of two, at least 16
    block_n: int = 64
    #: programs of a launch from which on rows have fewer lanes than splits; about ten times what an H200 runs
    #: at a time
    programs: int = 4096
    #: the fewest lanes of a row that has as many splits: keeps one long row among many short ones from being
    #: computed by a single program
    least_lanes: int = 4
    num_warps: int = 4
    #: loads in flight; the look-up of the page is one of the stages
    num_stages: int = 5

    def __post_init__(self) -> None:
        if self.block_n < 16 or self.block_n & (self.block_n - 1) or self.split_size % self.block_n:
            raise ValueError(f"block_n {self.block_n} and split_size {self.split_size} do not fit")
        if self.max_splits < 1 or self.least_lanes < 1:
            raise ValueError("a row needs a split and a lane")

    @classmethod
    def of(cls, head_dim: int, dtype: torch.dtype) -> DecodeTuning:
        """Tiles of keys and values of 32 KiB together, two of them in flight: compiled for sm_90 that takes
        72 KiB of shared memory and 154 registers, hence three programs per multiprocessor.

        Tiles of float32, which has no matrix unit, are small enough for the registers.
        """
        if dtype.itemsize == 4:
            return cls(block_n=16)
        return cls(block_n=32 if head_dim > 128 else 64)

    @classmethod
    def of_float8(cls, dtype: torch.dtype) -> DecodeTuning:
        """Tuning for keys and values of 8 bits, which take registers where they are widened."""
        return cls(block_n=16 if dtype.itemsize == 4 else 32)


@triton.jit
def _split(
    length: tl.tensor, WINDOW: tl.constexpr, SPLIT: tl.constexpr, MAX: tl.constexpr, BLOCK_N: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """(first visible position, first position of split 0, length of a split, number of splits)."""
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    begin = first // BLOCK_N * BLOCK_N
    even = tl.cdiv(tl.cdiv(length - begin, MAX), BLOCK_N) * BLOCK_N
    size = tl.maximum(even, SPLIT)
    return first, begin, size, tl.cdiv(length - begin, size)


# Arguments whose alignment or value changes from step to step must not select another compilation.
@triton.jit(do_not_specialize=["table", "kv_len", "lse", "stride_table", "num_splits"])
def _decode_kernel(
    q: tl.tensor, keys: tl.tensor, values: tl.tensor, key_scales: tl.tensor, value_scales: tl.tensor,
    table: tl.tensor, kv_len: tl.tensor,
    partial: tl.tensor, lse: tl.tensor,
    inner: tl.tensor, outer: tl.tensor, num_splits: tl.tensor, stride_table: tl.tensor,
    stride_q_row: tl.tensor, stride_q_head: tl.tensor,
    NUM_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    SOFT_CAP: tl.constexpr, WIDEN: tl.constexpr, FLOAT8: tl.constexpr, NATIVE: tl.constexpr,
    EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """One lane's splits of one row for up to HEADS heads of a KV head's group.

    Grid (KV heads x blocks of their group, rows, lanes): heads vary fastest, since the heads of one cell
    are adjacent in memory. Writes ``partial`` float32 [rows, NUM_HEADS, splits, HEAD_DIM], normalized, and
    ``lse`` [rows, NUM_HEADS, splits], the base-2 logarithm of its weight.
    """
    follow(EARLY)
    blocks: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    row = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(2)
    kv_head = tl.program_id(0) // blocks
    length = tl.load(kv_len + row).to(tl.int32)
    first, begin, size, count = _split(length, WINDOW, SPLIT, MAX_SPLITS, BLOCK_N)
    if lane >= count:
        return
    member = tl.program_id(0) % blocks * HEADS + tl.arange(0, BLOCK_M)
    valid = (tl.arange(0, BLOCK_M) < HEADS) & (member < GROUP)
    head = kv_head * GROUP + member
    dim = tl.arange(0, BLOCK_D)
    wanted = valid[:, None] & (dim < HEAD_DIM)[None, :]
    at = q + row * stride_q_row + head[:, None] * stride_q_head + dim[None, :]
    tile = tl.load(at, mask=wanted, other=0.0)
    low = tl.zeros([BLOCK_M], tl.int32) + first
    high = tl.zeros([BLOCK_M], tl.int32) + length
    for split in tl.range(lane, count, tl.num_programs(2)):
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        origin = begin + split * size
        for start in tl.range(origin, tl.minimum(origin + size, length), BLOCK_N):
            acc, peak, total = attend_tile(
                tile, acc, peak, total, keys + kv_head * HEAD_DIM, values + kv_head * HEAD_DIM,
                key_scales + kv_head, value_scales + kv_head,
                table + row * stride_table, start, first, length, low, high, inner, outer,
                NUM_HEADS // GROUP * HEAD_DIM, HEAD_DIM, BLOCK_D, BLOCK_N, PAGE_SIZE, SOFT_CAP, True, WIDEN,
                FLOAT8, NATIVE,
            )  # fmt: skip
        part = (row * NUM_HEADS + head) * num_splits + split
        result = normalized(acc, total)
        tl.store(partial + part[:, None] * HEAD_DIM + dim[None, :], result, mask=wanted)
        tl.store(lse + part, peak + tl.log2(total), mask=valid)


@triton.jit(do_not_specialize=["kv_len", "lse", "sinks", "num_splits"])
def _combine_kernel(
    partial: tl.tensor, lse: tl.tensor, kv_len: tl.tensor, sinks: tl.tensor, out: tl.tensor,
    num_splits: tl.tensor, stride_out_row: tl.tensor, stride_out_head: tl.tensor,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    SINKS: tl.constexpr, EARLY: tl.constexpr,
) -> None:  # fmt: skip
    """Combine the splits of one (head, row). BLOCK_S does not depend on the batch, hence nor do the sums."""
    follow(EARLY)
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    _, _, _, count = _split(tl.load(kv_len + row).to(tl.int32), WINDOW, SPLIT, MAX_SPLITS, BLOCK_N)
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    valid = split < count
    part = (row * NUM_HEADS + head) * num_splits + split
    weight = tl.load(lse + part, mask=valid, other=float("-inf"))
    wanted = valid[:, None] & (dim < HEAD_DIM)[None, :]
    value = tl.load(partial + part[:, None] * HEAD_DIM + dim[None, :], mask=wanted, other=0.0)
    result = mean_of_parts(weight, value, sinks, head, SINKS)
    at = out + row * stride_out_row + head * stride_out_head + dim
    tl.store(at, result.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


def _num_splits(longest: int, window: int | None, tuning: DecodeTuning) -> int:
    """The most splits of a row of up to ``longest`` positions."""
    if window is not None:
        longest = min(longest, window + tuning.block_n)
    return min(tuning.max_splits, -(-longest // tuning.split_size))


def _num_lanes(splits: int, blocks: int, tuning: DecodeTuning) -> int:
    """Lanes of a row with up to ``splits`` splits; ``blocks`` counts the blocks of heads of all rows."""
    return min(splits, max(tuning.least_lanes, tuning.programs // blocks))


def paged_decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    kv_len: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    tuning: DecodeTuning | None = None,
    scales: KVScales | None = None,
) -> torch.Tensor:
    """Attention of one query per row, at position ``kv_len - 1``.

    Reads nothing back from the device. Scratch memory comes from torch's allocator, so a captured launch has
    its own. Raises ValueError if the shapes do not fit or the tensors are not contiguous.

    Args:
        q: [R, num_heads, head_dim], heads contiguous; float32, float16 or bfloat16.
        keys, values: [pages, page_size, num_kv_heads, head_dim], of q's type, or e4m3 with ``scales``.
        block_table: [R, P] pages of each row, any integer type.
        kv_len: [R] positions of each row, the query's included; 0 marks a padding row, whose output is 0.
        scale: factor of the dot products.
        window: length of a sliding window in positions; None for none.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2, arXiv 2408.00118).
        sinks: [num_heads], see :class:`~aioinfer.model.attention.base.Attention`.
        out: where to write, [R, num_heads, head_dim].
        scales: of keys and values of 8 bits; None for others.

    Returns:
        [R, num_heads, head_dim]
    """
    check_layout(q, keys, values)
    rows, num_heads, head_dim = q.shape
    page_size, kv_heads = keys.shape[1:3]
    tuning = tuning or DecodeTuning.of(head_dim, q.dtype)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if rows == 0:
        return out
    heads = min(group := num_heads // kv_heads, 64)
    splits = _num_splits(block_table.shape[1] * page_size, window, tuning)
    blocks = kv_heads * -(-group // heads)
    partial, lse = scratch(rows * num_heads * splits, head_dim, q.device)
    inner, outer = score_factors(scale, soft_cap)
    cut = {"WINDOW": window or 0, "SPLIT": tuning.split_size, "MAX_SPLITS": tuning.max_splits}
    shape = {"HEAD_DIM": head_dim, "BLOCK_D": tile_dim(head_dim), "BLOCK_N": tuning.block_n}
    early = launches_early(q.device)
    _decode_kernel[(blocks, rows, _num_lanes(splits, rows * blocks, tuning))](
        q, *kv_arguments(keys, values, scales), block_table, kv_len, partial, lse, inner, outer, splits,
        block_table.stride(0), *q.stride()[:2],
        NUM_HEADS=num_heads, GROUP=group, HEADS=heads, BLOCK_M=max(16, triton.next_power_of_2(heads)),
        PAGE_SIZE=page_size, SOFT_CAP=soft_cap is not None, WIDEN=INTERPRETED, **shape, **cut,
        FLOAT8=scales is not None, NATIVE=scales is not None and float8_native(q.device),
        EARLY=early, launch_pdl=early, num_warps=tuning.num_warps, num_stages=tuning.num_stages,
        # A token has the same bits where its tile is masked and where it is not, see triton_common.
        enable_fp_fusion=False,
    )  # fmt: skip
    _combine_kernel[(num_heads, rows)](
        partial, lse, kv_len, lse if sinks is None else sinks, out, splits, *out.stride()[:2],
        NUM_HEADS=num_heads, BLOCK_S=triton.next_power_of_2(tuning.max_splits), SINKS=sinks is not None,
        **shape, **cut,
        EARLY=early, launch_pdl=early, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return out
