"""The feed-forward part of a layer, and the dense one: SwiGLU (Shazeer, 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from aioinfer.model.operations.base import Operations

__all__ = ["FeedForward", "SwiGLU"]


class FeedForward(Protocol):
    """Looks at one token at a time."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden], normed, to what is added to the residual."""


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
        """See :class:`FeedForward`."""
        gate_up = F.linear(hidden, self.gate_up, self.gate_up_bias)
        return F.linear(self.operations.silu_mul(gate_up), self.down, self.down_bias)
