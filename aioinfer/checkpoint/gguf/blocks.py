"""Blocks of GGUF as whole numbers with factors, without loss: what native kernels multiply.

Every function takes [rows, bytes of a row] and returns numbers [rows, inner], one a byte, with scales and
offsets [rows, groups] or None for none: see :class:`~aioinfer.checkpoint.tensors.QuantisedMatrix`.
Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from aioinfer.checkpoint.tensors import Rounding

__all__ = ["BLOCKS", "Numbers"]

_Bytes = npt.NDArray[np.uint8]
_Floats = npt.NDArray[np.float32]
#: elements that share a scale
_GROUP = 32
#: elements of a super-block, and its groups
_SUPER, _GROUPS = 256, 8


class Numbers(NamedTuple):
    """The contents of blocks."""

    #: [rows, inner]: uint8 of 4 and 6 bits, int8 of 8
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


def _flat(values: npt.NDArray[np.uint8]) -> _Bytes:
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
}
