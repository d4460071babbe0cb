"""SparseMLP: the feed-forward part of a layer in which each token passes some of many experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.experts import Experts, ExpertWeights
from aioinfer.model.moe.routing import Router
from aioinfer.model.weights import Weights

__all__ = ["SparseMLP", "load_experts"]


@dataclass(slots=True)
class SparseMLP:
    """A router, its experts, and what every token passes besides them."""

    router: Router
    experts: Experts
    #: experts that all tokens pass, put together as one; None if there are none
    shared: FeedForward | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :class:`~aioinfer.model.mlp.FeedForward`."""
        weights, experts = self.router(hidden)
        mixed = self.experts(hidden, weights, experts)
        return mixed if self.shared is None else mixed + self.shared(hidden)


def load_experts(weights: Weights, prefix: str, num_experts: int, hidden: int, middle: int) -> ExpertWeights:
    """The experts under ``prefix``: one by one in the checkpoint, or stacked, with gate and up together
    (transformers) or apart (dFactory).

    The stack is filled in place, so that there are never two copies of it. Raises ConfigError.
    """
    stacked = [f"{prefix}.{name}" for name in ("gate_up_proj", "down_proj")]
    if stacked[0] in weights:
        gate_up = weights.take(stacked[0], (num_experts, 2 * middle, hidden))
        return ExpertWeights(gate_up, weights.take(stacked[1], (num_experts, hidden, middle)))
    gate_up = weights.empty(num_experts, 2 * middle, hidden)
    down = weights.empty(num_experts, hidden, middle)
    if f"{prefix}.gate_proj" in weights:
        weights.take_into(gate_up[:, :middle], f"{prefix}.gate_proj")
        weights.take_into(gate_up[:, middle:], f"{prefix}.up_proj")
        weights.take_into(down, f"{prefix}.down_proj")
        return ExpertWeights(gate_up, down)
    for expert in range(num_experts):
        weights.take_into(gate_up[expert, :middle], f"{prefix}.{expert}.gate_proj.weight")
        weights.take_into(gate_up[expert, middle:], f"{prefix}.{expert}.up_proj.weight")
        weights.take_into(down[expert], f"{prefix}.{expert}.down_proj.weight")
    return ExpertWeights(gate_up, down)
