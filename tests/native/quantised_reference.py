"""The arithmetic of quantised linear layers in numpy: exact integers, and every operation of float32 in the
order that ``quantised.hpp`` states."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Quantised", "fused", "multiply", "round_rows"]

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


@dataclass(slots=True)
class Quantised:
    """A weight: ``scale * q + offset``."""

    #: [outputs, inner]; of 4 bits without offsets, less 8
    values: Ints
    #: [outputs, groups]
    scales: Floats
    offsets: Floats | None
    #: numbers of the inner dimension in a group; 0: all
    group: int

    def dequantised(self) -> Floats:
        """[outputs, inner]"""
        inner = self.values.shape[1]
        of = np.arange(inner) // (self.group or inner)
        found = self.scales[:, of] * self.values.astype(np.float32)
        return found if self.offsets is None else found + self.offsets[:, of]


def fused(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c with one rounding.

    In float64 the product is exact. The sum is rounded to odd: its last bit is set where something was lost,
    so that rounding it again to float32 gives what one rounding would have given.
    """
    product, addend = a.astype(np.float64) * b, c.astype(np.float64)
    total = product + addend
    # What the sum lost (Knuth's TwoSum).
    virtual = total - product
    lost = (product - (total - virtual)) + (addend - virtual)
    even = (total.view(np.int64) & 1) == 0
    towards = np.where((lost > 0) == (total > 0), 1, -1)
    odd = (total.view(np.int64) + np.where((lost != 0) & even, towards, 0)).view(np.float64)
    return np.where(np.isfinite(total), odd, total).astype(np.float32)


def round_rows(rows: Floats, group: int) -> tuple[Ints, Floats]:
    """Activations [rows, inner] as whole numbers, and factors [rows, groups]."""
    count, inner = rows.shape
    size = group or inner
    padded = np.zeros((count, -(-inner // size) * size), np.float32)
    padded[:, :inner] = rows
    groups = padded.reshape(count, -1, size)
    most = np.abs(groups).max(-1, keepdims=True)
    kept = np.isfinite(most) & (most >= np.float32(1e-30))
    divisor = np.where(kept, most, np.float32(1))
    exact = groups * (np.float32(127) / divisor)
    found = np.where(kept, np.rint(np.where(kept, exact, 0)), 0).astype(np.int64)
    factors = np.where(kept, divisor / np.float32(127), np.float32(0))
    factors = np.where(np.isfinite(most), factors, np.float32("nan")).astype(np.float32)
    return found.reshape(count, -1)[:, :inner], factors[..., 0]


def multiply(rows: Floats, weight: Quantised, bias: Floats | None) -> Floats:
    """[rows, inner] to [rows, outputs]"""
    size = weight.group or rows.shape[1]
    values, factors = round_rows(rows, weight.group)
    total = np.zeros((len(rows), len(weight.values)), np.float32)
    for g in range(factors.shape[1]):
        own, scales = slice(g * size, (g + 1) * size), weight.scales[None, :, g]
        sums, factor = values[:, own] @ weight.values[:, own].T, factors[:, g, None]
        if weight.offsets is not None:
            offset_factor = factor * values[:, own].sum(1, keepdims=True).astype(np.float32)
            total = fused(offset_factor, weight.offsets[None, :, g], total)
        total = fused(sums.astype(np.float32) * factor, scales, total)
    return total if bias is None else total + bias
