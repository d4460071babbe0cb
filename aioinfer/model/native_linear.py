"""Linear layers over the kernels in C++ (:mod:`aioinfer.native`), on a CPU.

Weights are packed when a layer is made, and rounded to 4 or 8 bits before if that is asked for. Activations
for rounded weights are rounded to 8 bits, with a factor for each row and group, and the products are sums of
integers; ``quantised.hpp`` has the arithmetic, operation by operation. Either way a row's results have the
same bits in any company and with any number of threads, and those of rounded weights that are not gated on
any processor.
"""

from __future__ import annotations

import functools
from typing import Any, Self

import torch

from aioinfer.checkpoint.tensors import QuantisedMatrix
from aioinfer.model.gates import Gate
from aioinfer.model.quantization import Rounding
from aioinfer.model.weights_cache import MappedMemory
from aioinfer.native.arguments import MappedWeightsArguments, QuantisedWeightsArguments, WeightsArguments
from aioinfer.native.bindings import GATES, ThreadPool
from aioinfer.native.packed import PackedWeights
from aioinfer.native.tensors import NUMBERS, address

__all__ = ["NativeLinear"]


class NativeLinear:
    """A linear layer with packed weights."""

    __slots__ = ("dtype", "gated", "kept", "packed", "rows")

    def __init__(
        self,
        pool: ThreadPool,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rounding: Rounding | None = None,
        *,
        gated: bool = False,
    ) -> None:
        """Pack a weight.

        Args:
            weight: [outputs, inner]; gated [2 * outputs, inner], gates first.
            rounding: to 8 bits without offsets, the largest of a group 127 times its scale; to 4 bits with
                scale and offset. None: not rounded.

        Raises:
            InvalidArguments: there are no kernels for this shape.
            ValueError: gated, and there are not as many gates as values; or the bias has another size.
        """
        if gated and len(weight) % 2:
            raise ValueError(f"gated weights have an even number of rows, not {len(weight)}")
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        rows, inner = weight.shape
        arguments = WeightsArguments(
            pool=pool.handle,
            rows=address(weight, weight.dtype, rows * inner),
            bias=None if bias is None else address(bias, weight.dtype, rows),
            **_shape(rows, inner, rounding, gated=gated),
        )
        self._take(PackedWeights(pool, NUMBERS[weight.dtype], arguments), rows, weight.dtype)

    def _take(
        self, packed: PackedWeights, rows: int, dtype: torch.dtype, kept: Rounding | None = None
    ) -> Self:
        self.packed, self.rows, self.dtype = packed, rows, dtype
        #: how it was quantised already when it was given; None: it was packed here
        self.kept = kept
        self.gated = packed.outputs != rows
        return self

    @classmethod
    def mapped(
        cls,
        pool: ThreadPool,
        memory: MappedMemory,
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        rounding: Rounding | None = None,
        *,
        dtype: torch.dtype,
        gated: bool = False,
        kept: bool = False,
    ) -> Self:
        """Take a weight that was packed, with the same arguments, and written to a file.

        Args:
            memory: what ``packed.memory`` was.
            shape: of the weight before it was packed; of activations and results ``dtype`` is the type.
            kept: it was quantised already when it was packed.

        Raises:
            InvalidArguments: a weight of this shape is packed into another size.
        """
        bias = None if bias is None else bias.contiguous()
        rows, inner = shape
        arguments = MappedWeightsArguments(
            packed=memory.address,
            size=memory.size,
            bias=None if bias is None else address(bias, dtype, rows),
            factors=memory.factors if kept else -1,
            table=_table(rounding.table) if rounding is not None else None,
            **_shape(rows, inner, rounding, gated=gated),
        )
        packed = PackedWeights(pool, NUMBERS[dtype], arguments, memory.owner)
        return cls.__new__(cls)._take(packed, rows, dtype, rounding if kept else None)

    @classmethod
    def given(
        cls,
        pool: ThreadPool,
        matrix: QuantisedMatrix,
        bias: torch.Tensor | None,
        *,
        dtype: torch.dtype,
        gated: bool = False,
    ) -> Self:
        """Take a weight that is quantised already, without loss.

        Args:
            bias: [rows], or None.
            dtype: the type of activations and results.

        Raises:
            InvalidArguments: there are no kernels for this shape, or a number has more bits.
            ValueError: a tensor has another size or type.
        """
        values, scales, offsets, rounding = matrix
        rows, inner = values.shape
        bits, group, table = rounding
        groups = -(-inner // group) if group else 1
        factors = [scales] if offsets is None else [scales, offsets]
        if any(each.shape != (rows, groups) for each in factors) or (gated and rows % 2):
            raise ValueError(f"scales and offsets are [{rows}, {groups}], and gated weights have even rows")
        values, scales = values.contiguous(), scales.contiguous()
        offsets = None if offsets is None else offsets.contiguous()
        bias = None if bias is None else bias.float().contiguous()
        arguments = QuantisedWeightsArguments(
            pool=pool.handle,
            values=address(values, torch.int8 if bits == 8 else torch.uint8, rows * inner),
            scales=address(scales, torch.float32, rows * groups),
            offsets=None if offsets is None else address(offsets, torch.float32, rows * groups),
            bias=None if bias is None else address(bias, torch.float32, rows),
            table=_table(table),
            **_shape(rows, inner, rounding, gated=gated),
        )
        packed = PackedWeights(pool, NUMBERS[dtype], arguments)
        return cls.__new__(cls)._take(packed, rows, dtype, rounding)

    def set(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        """Pack another weight, bias or both, shaped as when the layer was made; None: it stays."""
        count, dtype = self.rows * self.packed.inner, self.dtype
        weight = None if weight is None else weight.to(dtype).contiguous()
        bias = None if bias is None else bias.to(dtype).contiguous()
        self.packed.repack(
            None if weight is None else address(weight, dtype, count),
            None if bias is None else address(bias, dtype, self.rows),
        )

    def set_quantised(self, matrix: QuantisedMatrix, bias: torch.Tensor | None) -> None:
        """Exchange the weights for others that are quantised in the same way."""
        made = NativeLinear.given(self.packed.pool, matrix, bias, dtype=self.dtype, gated=self.gated)
        self.packed.exchange(made.packed)

    def __call__(self, values: torch.Tensor, gate: Gate | None = None) -> torch.Tensor:
        """Multiply. With rounded weights, all results of a row that is not finite are NaN.

        Args:
           gate: of gated weights the results are ``gate(gates) * up``, by silu if it is None; of others
               ``gate(outputs)``, or the outputs themselves.
        """
        values, count, packed = values.contiguous(), len(values), self.packed
        out = values.new_empty((count, packed.outputs))
        number = GATES[gate or ("silu" if self.gated else "none")]
        packed.apply(address(values, self.dtype, count * packed.inner), count, out.data_ptr(), number)
        return out

    def dequantised(self) -> torch.Tensor:
        """The weight as it was rounded, float32 [rows, inner]. Raises InvalidArguments: it was not."""
        out = torch.empty(self.rows, self.packed.inner)
        self.packed.dequantise(out.data_ptr())
        return out


@functools.cache
def _kept_table(numbers: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int8)


def _table(numbers: tuple[int, ...]) -> int | None:
    """The address of a table, which stays there."""
    return address(_kept_table(numbers), torch.int8, 16) if numbers else None


def _shape(rows: int, inner: int, rounding: Rounding | None, *, gated: bool) -> dict[str, Any]:
    bits, group, _ = rounding or (0, 0, ())
    outputs = rows // 2 if gated else rows
    return {"outputs": outputs, "inner": inner, "bits": bits, "group": group, "gated": gated}
