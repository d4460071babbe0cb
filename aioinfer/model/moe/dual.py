"""DualMLP: a dense part and experts side by side, with norms of their own (Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.sparse import SparseMLP
from aioinfer.model.norm import Norm
from aioinfer.model.operations.base import Operations

__all__ = ["DualMLP"]


@dataclass(slots=True, kw_only=True)
class DualMLP:
    """The sum of both. It reads the residual itself; a layer has no norm in front of it."""

    dense_norm: Norm
    dense: FeedForward
    dense_post_norm: Norm
    #: norm of the router's input
    router_norm: Norm
    experts_norm: Norm
    #: without shared experts
    sparse: SparseMLP
    experts_post_norm: Norm
    operations: Operations

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        dense = self._normed(self.dense(self._normed(hidden, self.dense_norm)), self.dense_post_norm)
        weights, experts = self.sparse.router(self._normed(hidden, self.router_norm))
        mixed = self.sparse.experts(self._normed(hidden, self.experts_norm), weights, experts)
        return dense + self._normed(mixed, self.experts_post_norm)

    def _normed(self, values: torch.Tensor, norm: Norm) -> torch.Tensor:
        return self.operations.add_norm(values, None, norm)[1]
