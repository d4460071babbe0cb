"""TorchOperations: plain torch, on any device. The reference for faster kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aioinfer.model.gates import Gate, gated
from aioinfer.model.norm import Norm

__all__ = ["TorchOperations", "normed"]


class TorchOperations:
    """Operations by torch.

    These results are rounded to the tensors' dtype, as in transformers: the sum; the normed value, if the
    norm's weight has that dtype, then its product with the weight; the gate, then its product.
    """

    __slots__ = ()

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if delta is not None:
            hidden = hidden + delta
        return hidden, normed(hidden, norm)

    def gate_mul(self, gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
        return gated(gate, *gate_up.chunk(2, dim=-1))


def normed(hidden: torch.Tensor, norm: Norm) -> torch.Tensor:
    """The norm of the rows of ``hidden`` [T, size], in its dtype."""
    size, weight, eps = hidden.shape[-1:], norm.weight, norm.eps
    if norm.bias is not None:
        return F.layer_norm(hidden, size, weight, norm.bias, eps)
    if hidden.dtype == torch.float32:
        return torch.rms_norm(hidden, size, weight, eps)
    if weight.dtype == torch.float32:
        return torch.rms_norm(hidden.float(), size, weight, eps).to(hidden.dtype)
    # In half precision the normed value is rounded before it is multiplied by the weight. The fused call
    # does not round there: every fourth element has other bits.
    return torch.rms_norm(hidden, size, None, eps) * weight
