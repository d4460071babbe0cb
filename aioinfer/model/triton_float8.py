"""Floats of 8 bits in Triton: their bits, and matrix products with weights of them.

e4m3 has a sign, four bits of exponent and three of fraction, no infinities, and 448 as its largest number
(OCP 8-bit Floating Point Specification; Micikevicius et al., arXiv 2209.05433). Tensors of it come as bytes:
devices before compute capability 8.9 have no instructions for them, and there the bits are taken apart.

The product ``x @ weight.T`` with activations as they are is ``weight @ x.T`` here: the matrix unit reads its
first operand from registers, where the weights are when they have been widened, and a few tokens fill its
second one better. A weight is multiplied by its scale after the sum over a block's columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl

from aioinfer.model.float8 import LEAST_WIDTH
from aioinfer.model.triton_support import interpreted

__all__ = [
    *("EVERY_TUNING", "Float8Tuning", "decoded", "encoded", "exponent_of"),
    *("float8_linear", "float8_native", "magnitude", "power_of_two", "round_rows", "shrunk"),
]

_INTERPRETED = interpreted()
#: the least compute capability with instructions for e4m3 (Ada)
_CAPABILITY = (8, 9)
#: the fewest tiles of weights that need no help of further programs to have all multiprocessors read
_TILES = 64
#: positions of the inner dimension that a program of several sums at least
_LEAST_SUM = 512
_MOST_SUMS = 4
#: numbers of rows, of which each is computed by another compilation of the kernel, or may be
EVERY_TUNING = (16, 32, 64, 256, 512)


@cache
def float8_native(device: torch.device) -> bool:
    """Whether a device has instructions that widen e4m3; else its bits are taken apart."""
    if _INTERPRETED:
        return False
    if device.type != "cuda":  # kernels are only compiled
        return bool(triton.runtime.driver.active.get_current_target().arch >= 89)
    return torch.cuda.get_device_capability(device) >= _CAPABILITY


@triton.jit
def decoded(raw: tl.tensor, like: tl.tensor, NATIVE: tl.constexpr) -> tl.tensor:
    """Bytes of e4m3 as numbers of ``like``'s type, which has them all. Without NATIVE, NaN becomes 480."""
    if NATIVE:
        return raw.to(tl.float8e4nv, bitcast=True).to(like.dtype)
    bits = raw.to(tl.uint32)
    # The same fields in a float32, whose exponent is counted from another origin: 2^120 makes up for that.
    moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(like.dtype)


@triton.jit
def power_of_two(byte: tl.tensor) -> tl.tensor:
    """A biased exponent as float32: 0 is 0, 255 infinity."""
    return (byte.to(tl.uint32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(largest: tl.tensor) -> tl.tensor:
    """The biased exponent, uint32, of the least power of two times which 448 is at least ``largest``; 0 for
    0, and 255 for infinity."""
    bits = tl.div_rn(largest, 448.0).to(tl.uint32, bitcast=True)
    return (bits + 0x7FFFFF) >> 23


@triton.jit
def magnitude(x: tl.tensor) -> tl.tensor:
    """The size of numbers; infinity for NaN, which a maximum would leave out."""
    size = tl.abs(x)
    return tl.where(size == size, size, float("inf"))


@triton.jit
def shrunk(x: tl.tensor, exponent: tl.tensor, like: tl.tensor) -> tl.tensor:
    """float32, from numbers of ``like``'s type, as bytes of e4m3, less a factor of a power of two."""
    # Its inverse is exact, 254 less the biased exponent; infinity stays so, and becomes 448.
    scaled = x * power_of_two(254 - tl.minimum(exponent, 253))
    if like.dtype == tl.float16:
        # 256 times 2^8 is infinite there.
        scaled = tl.where(exponent == 135, tl.minimum(tl.maximum(scaled, -240.0), 240.0), scaled)
    return encoded(scaled)


@triton.jit
def encoded(x: tl.tensor) -> tl.tensor:
    """float32 rounded to bytes of e4m3, ties to even; what is larger than 448, and NaN, becomes 448."""
    bits = x.to(tl.uint32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    # Below 2^-6 numbers are multiples of 2^-9, which is the distance of float32 numbers from 2^14 on.
    shifted = size.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    byte = tl.where(size < 0x3C800000, small, normal)
    return (byte | ((bits >> 24) & 0x80)).to(tl.uint8)


@dataclass(frozen=True, slots=True)
class Float8Tuning:
    """Sizes of a launch; ``block_k`` and the number of sums change the last bits."""

    #: outputs per program
    block_n: int
    #: tokens per program
    block_m: int
    #: inner dimensions at a time
    block_k: int
    num_warps: int
    num_stages: int

    @classmethod
    def of(cls, rows: int, inner: int, width: int, dtype: torch.dtype) -> Float8Tuning:
        """Tuning for a number of rows. None was measured: they follow from compiling, without spills, and
        from the bytes that are on their way. ``width``: columns of a block that have one scale."""
        block_k = 256 if rows <= 16 else 64
        while block_k > 32 and (block_k >= 2 * inner or (width < inner and width % block_k)):
            block_k //= 2
        if dtype.itemsize == 4:
            return cls(32, 16, min(block_k, 64), 4, 2)
        if rows <= 16:
            return cls(32, 16, block_k, 2, 4)
        if rows <= 64:
            return cls(64, 32 if rows <= 32 else 64, block_k, 4, 4)
        return cls(128, 128, block_k, 8, 3)


def num_sums(rows: int, outputs: int, inner: int, tuning: Float8Tuning) -> int:
    """Programs that share a tile of outputs, each with a part of the inner dimension: some where tiles of
    weights and rows are few."""
    tiles = -(-outputs // tuning.block_n)
    if tiles >= _TILES or rows > EVERY_TUNING[-2]:
        return 1
    return max(1, min(_MOST_SUMS, 2 * _TILES // tiles, inner // _LEAST_SUM))


@triton.jit(do_not_specialize=["rows"])
def _product_kernel(
    x: tl.tensor, weight: tl.tensor, scales: tl.tensor, bias: tl.tensor, out: tl.tensor,
    rows: tl.tensor, stride_x: tl.tensor,
    OUTPUTS: tl.constexpr, INNER: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, PART: tl.constexpr,
    BIAS: tl.constexpr, NATIVE: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_M rows of ``x`` [rows, INNER] times BLOCK_N rows of ``weight`` [OUTPUTS, INNER], over PART inner
    dimensions. Grid (blocks of rows, of outputs, parts); ``out`` [parts, rows, OUTPUTS].

    ``scales``: of each block of HEIGHT rows and WIDTH columns of the weight.
    """
    groups: tl.constexpr = (INNER + WIDTH - 1) // WIDTH
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    clamped = tl.minimum(column, OUTPUTS - 1)
    # Rows beyond the last one are read as the last one, and not stored.
    x_rows = x + tl.minimum(row, rows - 1).to(tl.int64) * stride_x
    w_rows = weight + clamped.to(tl.int64) * INNER
    factors = scales + clamped // HEIGHT * groups
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    first = tl.program_id(2) * PART
    for start in tl.range(first, tl.minimum(first + PART, INNER), BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        if INNER % BLOCK_K == 0:
            raw = tl.load(w_rows[:, None] + at[None, :])
            tile = tl.load(x_rows[:, None] + at[None, :])
        else:
            raw = tl.load(w_rows[:, None] + at[None, :], mask=(at < INNER)[None, :], other=0)
            tile = tl.load(x_rows[:, None] + at[None, :], mask=(at < INNER)[None, :], other=0.0)
        wide = decoded(raw, tile, NATIVE)
        if WIDEN:
            wide = wide.to(tl.float32)
            tile = tile.to(tl.float32)
        if WIDTH < INNER:
            part = tl.dot(wide, tl.trans(tile), input_precision="ieee")
            acc += part * tl.load(factors + start // WIDTH)[:, None]
        else:
            acc = tl.dot(wide, tl.trans(tile), acc, input_precision="ieee")
    if WIDTH >= INNER:
        acc *= tl.load(factors)[:, None]
    if BIAS:
        acc += tl.load(bias + clamped).to(tl.float32)[:, None]
    to = out + (tl.program_id(2) * rows + row).to(tl.int64)[None, :] * OUTPUTS + column[:, None]
    tl.store(to, acc.to(out.dtype.element_ty), mask=(row < rows)[None, :] & (column < OUTPUTS)[:, None])


@triton.jit(do_not_specialize=["rows"])
def _sum_kernel(
    parts: tl.tensor, bias: tl.tensor, out: tl.tensor, rows: tl.tensor,
    PARTS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr,
) -> None:  # fmt: skip
    """The sum of a row's parts, in their order. Grid (rows, blocks of outputs)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < OUTPUTS
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * rows + row) * OUTPUTS + column, mask=inside, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * OUTPUTS + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride_x"])
def _round_kernel(
    x: tl.tensor, out: tl.tensor, scales: tl.tensor, stride_x: tl.tensor,
    INNER: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """One row as bytes of e4m3, the largest of it 448 times its scale. Grid (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, INNER, BLOCK):
        value = tl.load(x + row * stride_x + start + lane, mask=start + lane < INNER, other=0.0)
        # A row that is not finite becomes NaN, by its scale, as it would be without rounding.
        largest = tl.maximum(largest, magnitude(value.to(tl.float32)))
    scale = scale_of(tl.max(largest, 0))
    tl.store(scales + row, scale)
    for start in tl.range(0, INNER, BLOCK):
        value = tl.load(x + row * stride_x + start + lane, mask=start + lane < INNER, other=0.0)
        byte = encoded(tl.div_rn(value.to(tl.float32), scale + tl.zeros([BLOCK], tl.float32)))
        tl.store(out + row * INNER + start + lane, byte, mask=start + lane < INNER)


@triton.jit
def scale_of(largest: tl.tensor) -> tl.tensor:
    """The scale of numbers up to ``largest``; NaN if that is infinite, 1 if it is 0."""
    scale = tl.where(largest == 0.0, 1.0, tl.div_rn(largest, 448.0))
    return tl.where(largest == float("inf"), float("nan"), scale)


def float8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None = None,
    *,
    tuning: Float8Tuning | None = None,
) -> torch.Tensor:
    """``x @ (weight * scales).T + bias``, summed in float32. Raises ValueError if shapes do not fit.

    Args:
        x: [T, inner], float32, float16 or bfloat16.
        weight: [outputs, inner], e4m3 or its bytes, contiguous.
        scales: [ceil(outputs / height), ceil(inner / width)], float32, contiguous.
        block: height and width; the width is ``inner`` or a multiple of 32.
        bias: [outputs] or None.

    Returns:
        [T, outputs] of x's dtype
    """
    (rows, inner), outputs, (height, width) = x.shape, len(weight), block
    if weight.shape[1] != inner or scales.shape != (-(-outputs // height), -(-inner // width)):
        raise ValueError(f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(scales.shape)} do not fit")
    if not (weight.is_contiguous() and scales.is_contiguous()) or (width < inner and width % LEAST_WIDTH):
        raise ValueError("weights and scales must be contiguous, and blocks multiples of 32 wide")
    out = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if rows == 0:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    tuning = tuning or Float8Tuning.of(rows, inner, width, x.dtype)
    sums = num_sums(rows, outputs, inner, tuning)
    part = -(-inner // (sums * tuning.block_k)) * tuning.block_k
    sums = -(-inner // part)
    to = out
    if sums > 1:
        to = torch.empty((sums, rows, outputs), dtype=torch.float32, device=x.device)
    grid = (-(-rows // tuning.block_m), -(-outputs // tuning.block_n), sums)
    _product_kernel[grid](
        x, weight.view(torch.uint8), scales, scales if bias is None else bias, to, rows, x.stride(0),
        OUTPUTS=outputs, INNER=inner, HEIGHT=height, WIDTH=min(width, inner),
        BLOCK_N=tuning.block_n, BLOCK_M=tuning.block_m, BLOCK_K=tuning.block_k, PART=part,
        BIAS=bias is not None and sums == 1, NATIVE=float8_native(x.device), WIDEN=_INTERPRETED,
        num_warps=tuning.num_warps, num_stages=tuning.num_stages, enable_fp_fusion=True,
    )  # fmt: skip
    if sums > 1:
        columns = min(1024, triton.next_power_of_2(outputs))
        _sum_kernel[(rows, -(-outputs // columns))](
            to, scales if bias is None else bias, out, rows,
            PARTS=sums, OUTPUTS=outputs, BLOCK=columns, BIAS=bias is not None, num_warps=4,
            enable_fp_fusion=True,
        )  # fmt: skip
    return out


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [T, inner] as e4m3, and the scale of each, float32 [T, 1]."""
    rows, inner = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty((rows, inner), dtype=torch.uint8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    if rows:
        block = min(4096, triton.next_power_of_2(inner))
        _round_kernel[(rows,)](
            x, out, scales, x.stride(0), INNER=inner, BLOCK=block, num_warps=8, enable_fp_fusion=True
        )
    return out.view(torch.float8_e4m3fn), scales
