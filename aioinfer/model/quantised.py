"""Quantised: linear layers whose weights have 4 or 8 bits, on a CPU.

A weight is ``scale * q + offset``, with a scale and an offset for each output and group of the inner
dimension. Activations are rounded to 8 bits, with a factor for each row and group, and the products are sums
of integers: results have the same bits in any company, with any number of threads and on any processor.
``quantised.hpp`` has the arithmetic, operation by operation.
"""

from __future__ import annotations

from typing import Literal, Self

import torch

from aioinfer.native.arguments import QuantisedWeightsArguments, RoundWeightsArguments
from aioinfer.native.bindings import QuantisedWeights, ThreadPool
from aioinfer.native.tensors import NUMBERS, address

__all__ = ["QuantisedLinear"]


class QuantisedLinear:
    """See :class:`~aioinfer.model.linear.Linear`."""

    __slots__ = ("dtype", "packed", "rows")

    def __init__(self, packed: QuantisedWeights, rows: int, dtype: torch.dtype) -> None:
        """``rows``: of the matrix; gated, twice the outputs. ``dtype``: of activations and results."""
        self.packed, self.rows, self.dtype = packed, rows, dtype

    @classmethod
    def rounded(
        cls,
        pool: ThreadPool,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *,
        bits: Literal[4, 8],
        group: int,
        gated: bool = False,
    ) -> Self:
        """Round a weight.

        Args:
            weight: [outputs, inner]; gated [2 * outputs, inner], gates first: ``silu(gate) * up``.
            bits: 8: the largest of a group is 127 times its scale, without an offset. 4: scale and offset.
            group: numbers of the inner dimension that share a scale, a multiple of 32; 0: all.

        Raises:
            InvalidArguments: there are no kernels for this shape.
        """
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        rows, inner = weight.shape
        arguments = RoundWeightsArguments(
            pool=pool.handle,
            rows=address(weight, weight.dtype, rows * inner),
            bias=None if bias is None else address(bias, weight.dtype, rows),
            outputs=rows // 2 if gated else rows,
            inner=inner,
            group=group,
            bits=bits,
            gated=gated,
        )
        return cls(QuantisedWeights(pool, arguments, NUMBERS[weight.dtype]), rows, weight.dtype)

    @classmethod
    def given(
        cls,
        pool: ThreadPool,
        values: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None,
        bias: torch.Tensor | None,
        *,
        bits: Literal[4, 8],
        group: int,
        dtype: torch.dtype,
        gated: bool = False,
    ) -> Self:
        """Take a weight that is quantised already, without loss.

        Args:
            values: [rows, inner], one number a byte: uint8 0 to 15 for 4 bits, int8 for 8 bits.
            scales: [rows, groups], float32.
            offsets: as ``scales``; None: 0 for 8 bits, and ``-8 * scale`` for 4.
            bias: [rows], float32, or None.
            group: as above; the last one may be shorter.

        Raises:
            InvalidArguments: there are no kernels for this shape, or a number has more than 4 bits.
        """
        rows, inner = values.shape
        groups = -(-inner // group) if group else 1
        values, scales = values.contiguous(), scales.contiguous()
        arguments = QuantisedWeightsArguments(
            pool=pool.handle,
            values=address(values, torch.uint8 if bits == 4 else torch.int8, rows * inner),
            scales=address(scales, torch.float32, rows * groups),
            offsets=None if offsets is None else address(offsets, torch.float32, rows * groups),
            bias=None if bias is None else address(bias, torch.float32, rows),
            outputs=rows // 2 if gated else rows,
            inner=inner,
            group=group,
            bits=bits,
            gated=gated,
        )
        return cls(QuantisedWeights(pool, arguments, None), rows, dtype)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """See :class:`~aioinfer.model.linear.Linear`. A row with infinity or NaN has only NaN as results."""
        values, count, packed = values.contiguous(), len(values), self.packed
        out = values.new_empty((count, packed.outputs))
        packed.apply(
            NUMBERS[self.dtype], address(values, self.dtype, count * packed.inner), count, out.data_ptr()
        )
        return out

    def dequantised(self) -> torch.Tensor:
        """The weight as it was rounded, float32 [rows, inner]."""
        out = torch.empty(self.rows, self.packed.inner)
        self.packed.dequantise(out.data_ptr())
        return out
