"""Blocks of GGUF as whole numbers with factors, without loss: what native kernels multiply.

Every function takes [rows, bytes of a row] and returns numbers [rows, inner], one a byte, with scales and
offsets [rows, groups] or None for none: see :class:`~aioinfer.checkpoint.tensors.QuantisedMatrix`.
Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aioinfer.checkpoint.tensors import FLOAT4, Rounding

__all__ = ["BLOCKS", "Numbers"]

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
#: elements that share a scale
_GROUP = 32
#: elements of a super-block, and its groups
_SUPER, _GROUPS = 256, 8
#: bytes of blocks that the package gguf takes apart at a time
_SLICE = 1 << 21


class Numbers(NamedTuple):
    """The contents of blocks."""

    #: [rows, inner]: uint8 of 4 and 6 bits, int8 of 8; or places in the table
    values: npt.NDArray[np.uint8] | npt.NDArray[np.int8]
    scales: _Floats
    offsets: _Floats | None


def _split(data: _Bytes, *sizes: int) -> list[_Bytes]:
    """Blocks of bytes in parts: [rows, blocks, size] of each."""
    blocks = data.reshape(len(data), -1, sum(sizes))
    ends = np.cumsum(sizes)
    return [blocks[:, :, end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _halves(part: _Bytes) -> _Floats:
    """Floats of 16 bits, [rows, blocks] of parts of two bytes."""
    return np.ascontiguousarray(part).view("<f2")[..., 0].astype(np.float32)


def _nibbles(part: _Bytes) -> _Bytes:
    """The lower halves of all bytes of a part, then the upper ones: [rows, blocks, 2 * size]."""
    return np.concatenate((part & 15, part >> 4), axis=2)


def _flat(values: npt.NDArray[Any]) -> _Bytes:
    return np.ascontiguousarray(values.reshape(len(values), -1))


def q8_0(data: _Bytes) -> Numbers:
    scale, values = _split(data, 2, _GROUP)
    return Numbers(_flat(values).view(np.int8), _halves(scale), None)


def q4_0(data: _Bytes) -> Numbers:
    scale, packed = _split(data, 2, 16)
    return Numbers(_flat(_nibbles(packed)), _halves(scale), None)


def q4_1(data: _Bytes) -> Numbers:
    scale, least, packed = _split(data, 2, 2, 16)
    return Numbers(_flat(_nibbles(packed)), _halves(scale), _halves(least))


def _fifth_bits(part: _Bytes) -> _Bytes:
    """[rows, blocks, 32] from four bytes: 16 where a bit is set."""
    return (np.unpackbits(np.ascontiguousarray(part), axis=2, bitorder="little") << 4).astype(np.uint8)


def q5_0(data: _Bytes) -> Numbers:
    scale, high, packed = _split(data, 2, 4, 16)
    # Half of 32 stands for 0, and of 6 bits half of 64.
    return Numbers(_flat((_nibbles(packed) | _fifth_bits(high)) + np.uint8(16)), _halves(scale), None)


def q5_1(data: _Bytes) -> Numbers:
    scale, least, high, packed = _split(data, 2, 2, 4, 16)
    values = _nibbles(packed) | _fifth_bits(high)
    return Numbers(_flat(values), _halves(scale), _halves(least))


def _factors(scale: _Bytes, least: _Bytes, packed: _Bytes) -> tuple[_Floats, _Floats]:
    """Scales and offsets of the groups of super-blocks: 6 bits each, the upper two of the last four in the
    upper bits of the first eight."""
    first, second, third = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=2)
    leasts = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=2)
    rows = len(packed)
    both = _halves(scale)[..., None] * scales, -_halves(least)[..., None] * leasts
    return both[0].reshape(rows, -1).astype(np.float32), both[1].reshape(rows, -1).astype(np.float32)


def _interleaved(packed: _Bytes) -> _Bytes:
    """The halves of bytes of a super-block: 32 lower ones, the upper ones of the same bytes, and so on."""
    parts = packed.reshape(*packed.shape[:2], _GROUPS // 2, _GROUP)
    return np.stack((parts & 15, parts >> 4), axis=3).reshape(*packed.shape[:2], _SUPER)


def q4_k(data: _Bytes) -> Numbers:
    scale, least, packed, values = _split(data, 2, 2, 12, 128)
    scales, offsets = _factors(scale, least, packed)
    return Numbers(_flat(_interleaved(values)), scales, offsets)


def q5_k(data: _Bytes) -> Numbers:
    scale, least, packed, high, values = _split(data, 2, 2, 12, 32, 128)
    scales, offsets = _factors(scale, least, packed)
    # Bit g of byte i is the fifth of element i of group g.
    bits = np.unpackbits(np.ascontiguousarray(high)[..., None], axis=3, bitorder="little")
    fifth = (bits.swapaxes(2, 3).reshape(*high.shape[:2], _SUPER) << 4).astype(np.uint8)
    return Numbers(_flat(_interleaved(values) | fifth), scales, offsets)


def q6_k(data: _Bytes) -> Numbers:
    lower, upper, factors, scale = _split(data, 128, 64, 16, 2)
    rows, blocks, _ = lower.shape
    # Of each half of a super-block; byte i of the upper bits has those of the elements i, i + 32, and so on.
    halves = lower.reshape(rows, blocks * 2, 64)
    pairs = upper.reshape(rows, blocks * 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    values = _nibbles(halves)
    values |= pairs.reshape(rows, blocks * 2, 128) << 4
    scales = _halves(scale)[..., None] * factors.view(np.int8)
    return Numbers(_flat(values), scales.reshape(rows, -1), None)


def iq4_nl(data: _Bytes) -> Numbers:
    scale, packed = _split(data, 2, 16)
    return Numbers(_flat(_nibbles(packed)), _halves(scale), None)


def iq4_xs(data: _Bytes) -> Numbers:
    scale, upper, lower, packed = _split(data, 2, 2, 4, 128)
    # Six bits, of which the upper two lie in 16 for all groups.
    high = _words(upper, "<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    numbers = (_halves_of_bytes(lower) | high << 4).astype(np.float32) - 32
    return Numbers(_flat(_nibbles(packed.reshape(len(data), -1, 16))), _steps(scale, numbers), None)


def mxfp4(data: _Bytes) -> Numbers:
    exponents, packed = _split(data, 1, 16)
    # Of numbers that are twice as large.
    scales = np.ldexp(np.float32(1), exponents[..., 0].astype(np.int32) - 128)
    return Numbers(_flat(_nibbles(packed)), scales.astype(np.float32), None)


def q2_k(data: _Bytes) -> Numbers:
    factors, packed, scale, least = _split(data, 16, 64, 2, 2)
    values = packed.reshape(len(data), -1, 1, _GROUP) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    return Numbers(_flat(values), _steps(scale, factors & 15), -_steps(least, factors >> 4))


def _steps(scale: _Bytes, numbers: npt.NDArray[Any]) -> _Floats:
    """Multiples of the scales of super-blocks, [rows, groups]."""
    product = _halves(scale)[..., None] * numbers.astype(np.float32)
    return product.reshape(len(scale), -1)


def _odd(scale: _Bytes, numbers: npt.NDArray[Any], factor: float) -> _Floats:
    return _steps(scale, (2.0 * numbers + 1) * factor)


def _halves_of_bytes(part: _Bytes) -> _Bytes:
    """The lower half of each byte, and then its upper half."""
    return np.stack((part & 15, part >> 4), axis=3).reshape(*part.shape[:2], -1)


def _words(part: _Bytes, kind: str) -> npt.NDArray[Any]:
    return np.ascontiguousarray(part).view(kind)


# -- scales of the types whose numbers the package gguf has grids for ----------------------------------------


def _q3_k(data: _Bytes) -> _Floats:
    _, lower, upper, scale = _split(data, 96, 8, 4, 2)
    high = np.concatenate([upper >> shift & 3 for shift in (0, 2, 4, 6)], axis=2)
    return _steps(scale, (_nibbles(lower) | high << 4).astype(np.float32) - 32)


def _iq1_s(data: _Bytes) -> _Floats:
    scale, _, high = _split(data, 2, 32, 16)
    return _odd(scale, _words(high, "<u2") >> 12 & 7, 0.125)


def _iq1_m(data: _Bytes) -> _Floats:
    _, factors = _split(data, 48, 8)
    words = _words(factors, "<u2")
    # The scale is what the upper four bits of all words are together.
    scale = sum((words[:, :, at] >> 12) << 4 * at for at in range(4)).astype("<u2")  # type: ignore[union-attr]
    numbers = (words[..., None] >> np.arange(0, 12, 3, dtype=np.uint16) & 7).reshape(*words.shape[:2], 16)
    return _odd(scale[..., None].view(np.uint8), numbers, 0.125)


def _iq2_xxs(data: _Bytes) -> _Floats:
    scale, packed = _split(data, 2, 64)
    return _odd(scale, _words(packed, "<u4")[:, :, 1::2] >> 28, 0.125)


def _iq2_xs(data: _Bytes) -> _Floats:
    scale, _, factors = _split(data, 2, 64, 8)
    return _odd(scale, _halves_of_bytes(factors), 0.125)


def _iq2_s(data: _Bytes) -> _Floats:
    scale, _, factors = _split(data, 2, 72, 8)
    return _odd(scale, _halves_of_bytes(factors), 0.125)


def _iq3_xxs(data: _Bytes) -> _Floats:
    scale, _, factors = _split(data, 2, 64, 32)
    return _odd(scale, _words(factors, "<u4") >> 28, 0.25)


def _iq3_s(data: _Bytes) -> _Floats:
    scale, _, factors = _split(data, 2, 104, 4)
    return _odd(scale, _halves_of_bytes(factors), 1.0)


def _nvfp4(data: _Bytes) -> _Floats:
    from gguf.quants import NVFP4

    scale, _ = _split(data, 4, 32)
    found: _Floats = NVFP4.ue4m3_to_fp32(scale).reshape(len(data), -1).astype(np.float32)
    return found


def _at_the_end(data: _Bytes, size: int) -> _Floats:
    return _halves(_split(data, size, 2)[1])


def _by_grid(
    name: str, table: tuple[int, ...], scales: Callable[[_Bytes], _Floats]
) -> Callable[[_Bytes], Numbers]:
    """Takes blocks apart by what the package makes of them: an element is the product of its scale and a
    number of the table, exactly."""
    places = np.zeros(256, dtype=np.uint8)
    for place, number in reversed([*enumerate(table)]):
        places[number % 256] = place

    def unpack(data: _Bytes) -> Numbers:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        found, parts = scales(data), []
        step = max(1, _SLICE // data.shape[1])
        for start in range(0, len(data), step):
            wide = dequantize(data[start : start + step], GGMLQuantizationType[name])
            own = found[start : start + step, :, None]
            with np.errstate(invalid="ignore"):  # of damaged files
                numbers = np.rint(wide.reshape(*own.shape[:2], -1) / np.where(own == 0, 1, own))
                parts.append(places[numbers.astype(np.int8).view(np.uint8)].reshape(wide.shape))
        return Numbers(np.concatenate(parts), found, None)

    return unpack


def _padded(*numbers: int) -> tuple[int, ...]:
    return (*numbers, *(0,) * (16 - len(numbers)))


def _signed(*numbers: int) -> tuple[int, ...]:
    return _padded(*numbers, *(-number for number in numbers))


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
#: whose numbers lie in groups of 16, as those of 4 bits in whole numbers do not
_TWO_BITS, _THREE_BITS = _padded(*range(4)), _padded(*range(-4, 4))
_IQ1, _IQ2 = _signed(1, 7, 9), _signed(8, 25, 43)
_IQ3_XXS, _IQ3_S = _signed(4, 12, 20, 28, 36, 44, 52, 62), _signed(*range(1, 16, 2))
_TERNARY = _padded(*range(-1, 3))
#: those that the package takes apart
_GRIDS: dict[str, tuple[int, tuple[int, ...], Callable[[_Bytes], _Floats]]] = {
    "Q3_K": (16, _THREE_BITS, _q3_k),
    "IQ1_S": (_GROUP, _IQ1, _iq1_s),
    "IQ1_M": (16, _IQ1, _iq1_m),
    "IQ2_XXS": (_GROUP, _IQ2, _iq2_xxs),
    "IQ2_XS": (16, _IQ2, _iq2_xs),
    "IQ2_S": (16, _IQ2, _iq2_s),
    "IQ3_XXS": (_GROUP, _IQ3_XXS, _iq3_xxs),
    "IQ3_S": (_GROUP, _IQ3_S, _iq3_s),
    "TQ1_0": (_SUPER, _TERNARY, partial(_at_the_end, size=52)),
    "TQ2_0": (_SUPER, _TERNARY, partial(_at_the_end, size=64)),
    "NVFP4": (16, FLOAT4, _nvfp4),
}
#: by the name of a type: the rounding of its blocks, and the function that takes them apart
BLOCKS: dict[str, tuple[Rounding, Callable[[_Bytes], Numbers]]] = {
    "Q8_0": (Rounding(8, _GROUP), q8_0),
    "Q4_0": (Rounding(4, _GROUP), q4_0),
    "Q4_1": (Rounding(4, _GROUP), q4_1),
    "Q5_0": (Rounding(6, _GROUP), q5_0),
    "Q5_1": (Rounding(6, _GROUP), q5_1),
    "Q4_K": (Rounding(4, _GROUP), q4_k),
    "Q5_K": (Rounding(6, _GROUP), q5_k),
    "Q6_K": (Rounding(6, 16), q6_k),
    "Q2_K": (Rounding(4, 16, _TWO_BITS), q2_k),
    "IQ4_NL": (Rounding(4, _GROUP, _IQ4), iq4_nl),
    "IQ4_XS": (Rounding(4, _GROUP, _IQ4), iq4_xs),
    "MXFP4": (Rounding(4, _GROUP, FLOAT4), mxfp4),
    **{
        name: (Rounding(4, group, table), _by_grid(name, table, scales))
        for name, (group, table, scales) in _GRIDS.items()
    },
}
