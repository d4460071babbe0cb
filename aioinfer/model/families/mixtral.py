"""Mixtral (arXiv 2401.04088): Mistral with experts in every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aioinfer.model.families.base import Source
from aioinfer.model.families.llama import LlamaLike
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.routing import SoftmaxRouter

__all__ = ["Mixtral"]

#: gate, up and down of an expert
_NAMES = ("w1", "w3", "w2")


@dataclass(frozen=True, slots=True)
class Mixtral(LlamaLike):
    """Mixtral."""

    experts: Literal["none", "config", "all"] = "all"

    def _mlp(self, source: Source, index: int) -> FeedForward:
        config, prefix = source.config, f"model.layers.{index}.block_sparse_moe"
        gate = source.weights.take(f"{prefix}.gate.weight", (config.num_experts, config.hidden_size))
        rule = SoftmaxRouter(gate, config.num_experts_per_tok, True)
        return source.sparse(rule, f"{prefix}.experts", names=_NAMES)
