"""FeedForward: the interface of a layer's feed-forward part; and the dense ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from aioinfer.model.gates import Gate, activated
from aioinfer.model.linear import Linear
from aioinfer.model.operations.base import Operations

__all__ = ["FeedForward", "GatedMLP", "PlainMLP"]


class FeedForward(Protocol):
    """The feed-forward part of a layer: computes every token separately."""

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed [T, hidden] to the summand of the residual, [T, hidden]."""


@dataclass(slots=True)
class GatedMLP:
    """``down(gate_function(gate(x)) * up(x))``, with gate and up in one matrix (SwiGLU and GeGLU: Shazeer,
    arXiv 2002.05202)."""

    #: to [T, 2 * intermediate]
    gate_up: Linear
    down: Linear
    gate: Gate
    operations: Operations

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.operations.gate_mul(self.gate_up(hidden), self.gate))


@dataclass(slots=True)
class PlainMLP:
    """``down(gate_function(up(x)))`` (GPT-2)."""

    #: to [T, intermediate]
    up: Linear
    down: Linear
    gate: Gate

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(activated(self.gate, self.up(hidden)))
