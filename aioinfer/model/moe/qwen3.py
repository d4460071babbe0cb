"""Qwen3-MoE: which layers have experts, and how they are loaded."""

from __future__ import annotations

from typing import Any

from aioinfer.errors import ConfigError
from aioinfer.model.moe.choice import Choice, make_experts, make_router
from aioinfer.model.moe.routing import SoftmaxRouter
from aioinfer.model.moe.sparse import SparseMLP, load_experts
from aioinfer.model.weights import Weights

__all__ = ["expert_shape", "load_sparse_mlp", "sparse_layers"]


def sparse_layers(config: Any) -> frozenset[int]:
    """Indices of the layers with experts; empty for other families. Raises ConfigError."""
    if config.model_type != "qwen3_moe" or not config.num_experts:
        return frozenset()
    step, chosen = config.decoder_sparse_step, config.num_experts_per_tok
    if step < 1 or not 1 <= chosen <= config.num_experts:
        raise ConfigError(f"model: {chosen} of {config.num_experts} experts in every {step}th layer")
    layers = range(step - 1, config.num_hidden_layers, step)
    return frozenset(layers) - frozenset(config.mlp_only_layers or ())


def expert_shape(config: Any) -> tuple[int, int] | None:
    """(hidden size, inner size) of the experts; None if no layer has any. Raises ConfigError."""
    return (config.hidden_size, config.moe_intermediate_size) if sparse_layers(config) else None


def load_sparse_mlp(config: Any, weights: Weights, prefix: str, choice: Choice) -> SparseMLP:
    """The experts of the layer whose feed-forward part is ``prefix``. Raises ConfigError."""
    count, hidden = config.num_experts, config.hidden_size
    gate = weights.take(f"{prefix}.gate.weight", (count, hidden))
    stack = load_experts(weights, f"{prefix}.experts", count, hidden, config.moe_intermediate_size)
    rule = SoftmaxRouter(gate, config.num_experts_per_tok, config.norm_topk_prob)
    return SparseMLP(make_router(rule, choice), make_experts(stack, choice))
