"""Linear layers with weights of floats of 8 bits, on CUDA: as they are stored, or rounded when loaded.

Two ways to multiply: by a Triton kernel that widens weights and leaves activations as they are, and by
``torch._scaled_mm``, for which activations are rounded, too, with a scale for each token.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.checkpoint.tensors import Float8Matrix
from aioinfer.errors import ConfigError
from aioinfer.model.float8 import has_nan, rounded_matrix, too_narrow
from aioinfer.model.linear import Linear
from aioinfer.model.quantization import FLOAT8, Quantization
from aioinfer.model.weights import StoredMatrix

__all__ = ["Float8Layers", "Float8Linear", "ScaledLinear", "scaled_unsupported"]

#: sizes that ``torch._scaled_mm`` takes are multiples of this
_MULTIPLE = 16
#: the least compute capability that multiplies floats of 8 bits
_CAPABILITY = (8, 9)


class Float8Linear:
    """A linear layer with weights of 8 bits; activations are not rounded."""

    __slots__ = ("bias", "matrix")
    #: shapes of this process
    _compiled: ClassVar[set[object]] = set()

    def __init__(self, matrix: Float8Matrix, bias: torch.Tensor | None) -> None:
        """Both on the device, and not shared with others."""
        self.matrix = matrix
        self.bias = bias

    @classmethod
    def unsupported(cls, matrix: Float8Matrix) -> bool:
        """Whether the kernel cannot compute a matrix."""
        return too_narrow(matrix.block, matrix.values.shape[1])

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        from aioinfer.model.triton_float8 import float8_linear

        if values.is_cuda:
            self._compile(values)
        return float8_linear(values, *self.matrix, self.bias)

    def _compile(self, values: torch.Tensor) -> None:
        """Compile the kernels for every number of rows before the first step of a matrix of this shape, so
        that later steps never wait for a compiler."""
        from aioinfer.model.triton_float8 import EVERY_TUNING, float8_linear

        matrix = self.matrix
        shape = *matrix.values.shape, *matrix.block, self.bias is None, values.dtype, values.device
        if shape in self._compiled or torch.cuda.is_current_stream_capturing():
            return
        self._compiled.add(shape)
        for rows in EVERY_TUNING:
            float8_linear(values.new_zeros(rows, values.shape[1]), *matrix, self.bias)

    def set(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        """Round a weight in the blocks of the present one. In place, for captured graphs read it there."""
        if weight is not None:
            self._copy(rounded_matrix(weight.to(self.matrix.values.device), self.matrix.block))
        if bias is not None:
            assert self.bias is not None
            self.bias.copy_(bias)

    def set_stored(self, stored: StoredMatrix, *, weight: bool, bias: bool) -> None:
        """Copy a matrix of a checkpoint; without another rounding if it is stored in these blocks."""
        given = stored.float8() if weight else None
        if given is not None and given.block == self.matrix.block:
            self._copy(given)
            weight = False
        self.set(stored.view() if weight else None, stored.bias() if bias else None)

    def _copy(self, matrix: Float8Matrix) -> None:
        self.matrix.values.view(torch.uint8).copy_(matrix.values.view(torch.uint8))
        self.matrix.scales.copy_(matrix.scales)


class ScaledLinear(Float8Linear):
    """A linear layer that rounds activations to floats of 8 bits, the largest of a token to the largest of
    these. The scale of a weight is that of its output."""

    __slots__ = ()

    @classmethod
    def unsupported(cls, matrix: Float8Matrix) -> bool:
        rows, inner = matrix.values.shape
        return matrix.block != (1, inner) or rows % _MULTIPLE != 0 or inner % _MULTIPLE != 0

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        from aioinfer.model.triton_float8 import round_rows

        if len(values) == 0:
            return values.new_empty(0, len(self.matrix.values))
        return _scaled_product(*round_rows(values), self.matrix, self.bias, values.dtype)


def _scaled_product(
    rows: torch.Tensor,
    scales: torch.Tensor,
    matrix: Float8Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    product: torch.Tensor = torch._scaled_mm(
        rows,
        matrix.values.T,
        scale_a=scales,
        scale_b=matrix.scales.T,
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=True,
    )
    return product


class Float8Layers:
    """Makes linear layers of floats of 8 bits, for :class:`~aioinfer.model.torch_layers.TorchLayers`."""

    def __init__(self, quantization: Quantization, device: torch.device) -> None:
        """``quantization``: "auto", for what is stored so, or one of ``FLOAT8``."""
        self._device = device
        self._linear = ScaledLinear if quantization == "fp8-dynamic" else Float8Linear
        #: weights that are not stored so are rounded
        self.rounds = quantization in FLOAT8
        #: see :class:`~aioinfer.model.layer_kernels.LayerKernels`
        self.kept_bits: set[int] = set()

    def linear(self, stored: StoredMatrix) -> Linear | None:
        """A layer of floats of 8 bits; None if it is not to be one. Raises ConfigError: NaN is stored."""
        matrix = stored.float8()
        if matrix is not None and not self._linear.unsupported(matrix):
            if has_nan(matrix.values):
                raise ConfigError(f"model: {stored.name} has NaN")
            self.kept_bits.add(8)
            matrix = Float8Matrix(
                matrix.values.to(self._device).contiguous(),
                matrix.scales.to(self._device).contiguous(),
                matrix.block,
            )
            return self._linear(matrix, stored.bias())
        if not self.rounds:
            return None
        made = rounded_matrix(stored.load(), (1, stored.shape[1]))
        kind = Float8Linear if self._linear.unsupported(made) else self._linear
        return kind(made, stored.bias())


def scaled_unsupported(device: torch.device, dtype: torch.dtype) -> str | None:
    """Reason why ``torch._scaled_mm`` cannot multiply on a device, in words for the user; None if it can."""
    if dtype != torch.bfloat16:
        return f"the results of torch._scaled_mm are bfloat16, not {str(dtype).removeprefix('torch.')}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        return "the device is older than compute capability {}.{}".format(*_CAPABILITY)
    rows = torch.ones(_MULTIPLE, 2 * _MULTIPLE, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(_MULTIPLE, 1, device=device)
    matrix = Float8Matrix(rows, scales, (1, 2 * _MULTIPLE))
    try:
        # Which scales, types and devices it supports differs between versions of torch.
        _scaled_product(rows, scales, matrix, None, dtype)
    except (RuntimeError, AttributeError) as error:
        return f"torch says: {str(error).splitlines()[0]}"
    return None
