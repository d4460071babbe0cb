"""The noise of :mod:`aioinfer.sampling.noise` inside Triton kernels.

Random bits and uniform numbers are bitwise equal: they take integer arithmetic, a conversion and two
operations that are correctly rounded everywhere. The Gumbel noise takes two logarithms. Compiled, they are
the functions of libdevice that torch's own CUDA kernels call, so the noise is torch's on the same device;
between a CPU and a GPU it differs in the last place or two of the inner logarithm, which is at most 4e-7
where the noise is near 0 and an ulp or two where it is large.

Triton's interpreter has no libdevice. There the logarithms are computed in float64 and rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from aioinfer.model.triton_support import interpreted

__all__ = ["INTERPRETED", "exponential", "gumbel", "logarithm", "random_bits", "row_key", "uniform"]


@triton.jit
def _mix(h: tl.tensor) -> tl.tensor:
    """The finalizer of MurmurHash3, on uint64."""
    h = (h ^ (h >> 33)) * 0xFF51AFD7ED558CCD
    h = (h ^ (h >> 33)) * 0xC4CEB9FE1A85EC53
    return h ^ (h >> 33)


@triton.jit
def row_key(seed: tl.tensor, position: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The low and the high key word of a row, uint32, from its int64 seed and position."""
    seed = seed.to(tl.uint64)
    position = position.to(tl.uint64)
    key = _mix(_mix(seed + 0x9E3779B97F4A7C15) + position * 0x9E3779B97F4A7C15)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@triton.jit
def random_bits(low: tl.tensor, high: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """32 random bits for each token id, uint32."""
    x = low + ids.to(tl.uint32)
    x = (x ^ (x >> 17)) * 0xED5AD4BB + high
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = (x ^ (x >> 15)) * 0x31848BAB
    return x ^ (x >> 14)


@triton.jit
def uniform(low: tl.tensor, high: tl.tensor, ids: tl.tensor) -> tl.tensor:
    """Uniform float32 in (0, 1) for each token id."""
    number = (random_bits(low, high, ids) & 0x7FFFFFFF).to(tl.int32).to(tl.float32)
    # 2**-31, and the largest float32 below 1.
    return tl.minimum((number + 0.5) * 4.656612873077393e-10, 0.9999999403953552)


@triton.jit
def gumbel(low: tl.tensor, high: tl.tensor, ids: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """Standard Gumbel noise for each token id, float32."""
    u = uniform(low, high, ids)
    if WIDEN:
        # u is a multiple of 2**-32, so 1 - u is exact in float64; the error of its logarithm is below the
        # last place of a float32.
        return (-tl.log(-tl.log(1.0 - u.to(tl.float64)).to(tl.float32).to(tl.float64))).to(tl.float32)
    return -libdevice.log(-libdevice.log1p(-u))


@triton.jit
def logarithm(x: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """log as torch computes it, float32; -inf for 0."""
    if WIDEN:
        return tl.log(x.to(tl.float64)).to(tl.float32)
    return libdevice.log(x)


@triton.jit
def exponential(x: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """exp as torch computes it, float32; the error of tl.exp grows with the distance of x from 0."""
    if WIDEN:
        return tl.exp(x.to(tl.float64)).to(tl.float32)
    return libdevice.exp(x)


#: whether kernels run in Triton's interpreter, on CPU tensors
INTERPRETED = interpreted()
