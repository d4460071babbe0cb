"""Linear layers, and the choice between torch's and oneDNN's multiplication."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

__all__ = ["HeadsLinear", "Linear", "MakeLinear", "PackedLinear", "TorchLinear", "packed_or_torch"]

#: the number of rows for which oneDNN optimizes the layout of the weights
_EXPECTED_ROWS = 8


class Linear(Protocol):
    """``x @ weight.T + bias``. The result of a row depends on other rows by rounding at most."""

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """[T, inner] to [T, outputs], in the same dtype."""

    def set(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        """Replace the weight, the bias or both by copies; None: it stays."""


#: makes a linear layer from a weight [outputs, inner] and a bias [outputs] or None
MakeLinear = Callable[[torch.Tensor, torch.Tensor | None], Linear]


@dataclass(frozen=True, slots=True)
class TorchLinear:
    """Plain torch, on any device."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def set(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        """Replace the weight, the bias or both: in place on CUDA, where captured graphs read them."""
        if weight is not None:
            _set(self, "weight", weight)
        if bias is not None:
            _set(self, "bias", bias)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return F.linear(values, self.weight, self.bias)


class HeadsLinear:
    """A product of each head's own, by plain torch: [T, heads, inner] to [T, heads, outputs]."""

    __slots__ = ("each",)

    def __init__(self, weight: torch.Tensor, heads: int) -> None:
        """``weight``: [heads * outputs, inner]."""
        #: [heads, outputs, inner]
        self.each = weight.view(heads, -1, weight.shape[1])

    def set(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        if weight is None:
            return
        if self.each.is_cuda:
            self.each.copy_(weight.view(self.each.shape))
        else:
            self.each = weight.view(self.each.shape).to(self.each.dtype, copy=True)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return (values.transpose(0, 1) @ self.each.mT).transpose(0, 1)


class PackedLinear:
    """oneDNN's multiplication by prepacked weights, on a CPU: two to three times as fast as ``F.linear`` for
    the few rows of a decode. torch's compiler emits these operations for frozen weights; they are not part of
    its documented interface, hence :func:`packed_or_torch`."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
        self._bias = bias

    def set(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        if weight is not None:
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)
        if bias is not None:
            self._bias = bias.clone()

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            values, self._weight, self._bias, "none", [], ""
        )
        return result


def _set(linear: TorchLinear, field: str, given: torch.Tensor) -> None:
    own: torch.Tensor = getattr(linear, field)
    if own.is_cuda:
        own.copy_(given)
    else:
        # Its own memory may be a file's, mapped for reading.
        object.__setattr__(linear, field, given.to(own.dtype, copy=True))


def packed_or_torch(device: torch.device, dtype: torch.dtype) -> MakeLinear:
    """:class:`PackedLinear` if the installed torch supports it for ``dtype``, else :class:`TorchLinear`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return TorchLinear
    weight = torch.arange(32 * 16, device=device).view(32, 16).to(dtype)
    values = torch.ones(1, 16, dtype=dtype, device=device)
    try:
        found = PackedLinear(weight, None)(values)
    except (RuntimeError, AttributeError):
        # This torch lacks the operation, or was built without oneDNN, or oneDNN does not support the dtype on
        # this processor: plain torch computes the same, slower.
        return TorchLinear
    return PackedLinear if torch.allclose(found, F.linear(values, weight)) else TorchLinear
