"""TorchOperations: plain torch, on any device. The reference for faster kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["TorchOperations"]


class TorchOperations:
    """See :class:`~aioinfer.model.operations.base.Operations`.

    These results are rounded to the tensors' dtype, as in transformers: the sum; the normed value, then its
    product with the weight; the gate's silu, then its product.
    """

    __slots__ = ()

    def add_rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if delta is not None:
            hidden = hidden + delta
        if hidden.dtype == torch.float32:
            return hidden, torch.rms_norm(hidden, (hidden.shape[-1],), weight, eps)
        # In half precision the normed value is rounded before it is multiplied by the weight. The fused call
        # does not round there: every fourth element has other bits.
        return hidden, torch.rms_norm(hidden, (hidden.shape[-1],), None, eps) * weight

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up
