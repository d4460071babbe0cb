"""FeedForward: the interface of a layer's feed-forward part; and the dense one, SwiGLU (Shazeer, 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from aioinfer.model.linear import Linear
from aioinfer.model.operations.base import Operations

__all__ = ["FeedForward", "SwiGLU"]


class FeedForward(Protocol):
    """The feed-forward part of a layer: computes every token separately."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed [T, hidden] to the summand of the residual, [T, hidden]."""


@dataclass(slots=True)
class SwiGLU:
    """``down(silu(gate(x)) * up(x))``, with gate and up in one matrix."""

    #: to [T, 2 * intermediate]
    gate_up: Linear
    down: Linear
    operations: Operations

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :class:`FeedForward`."""
        return self.down(self.operations.silu_mul(self.gate_up(hidden)))
