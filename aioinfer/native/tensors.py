"""Addresses of tensors, as the kernels take them: checked, because a kernel cannot."""

from __future__ import annotations

import torch

from aioinfer.native.bindings import Number

__all__ = ["NUMBERS", "address", "rows_address"]

#: types of models by dtype
NUMBERS: dict[torch.dtype, Number] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


def address(tensor: torch.Tensor, dtype: torch.dtype, count: int) -> int:
    """The address of a contiguous tensor on the CPU of which a kernel reads or writes ``count`` elements.

    The tensor must outlive the call that the address is for.

    Raises:
        ValueError: the tensor has another dtype, lies elsewhere or not contiguously, or is too small.
    """
    if tensor.dtype is not dtype or tensor.numel() < count or not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError(
            f"a kernel needs {count} contiguous elements, {dtype}, on a CPU, not {_look(tensor)}"
        )
    return tensor.data_ptr()


def rows_address(tensor: torch.Tensor, dtype: torch.dtype) -> int:
    """As :func:`address`, of a matrix [rows, columns] whose rows are contiguous, ``stride(0)`` apart."""
    columns = tensor.shape[1]
    if tensor.dtype is not dtype or (columns > 1 and tensor.stride(1) != 1) or not tensor.is_cpu:
        raise ValueError(f"a kernel needs contiguous rows, {dtype}, on a CPU, not {_look(tensor)}")
    return tensor.data_ptr()


def _look(tensor: torch.Tensor) -> str:
    shape, strides = tuple(tensor.shape), tensor.stride()
    return f"{tensor.dtype} of shape {shape} and strides {strides} on {tensor.device}"
