"""SwiGLU: the feed-forward part of a dense layer (Shazeer, 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioinfer.model.operations.base import Operations

__all__ = ["SwiGLU"]


@dataclass(slots=True)
class SwiGLU:
    """``down(silu(gate(x)) * up(x))``, gate and up in one matrix."""

    #: [2 * intermediate, hidden]
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    #: [hidden, intermediate]
    down: torch.Tensor
    down_bias: torch.Tensor | None
    operations: Operations

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden], normed, to what is added to the residual."""
        gate_up = F.linear(hidden, self.gate_up, self.gate_up_bias)
        return F.linear(self.operations.silu_mul(gate_up), self.down, self.down_bias)
