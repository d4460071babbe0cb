"""gpt-oss (arXiv 2508.10925): Llama with sinks, windows in every other layer, and experts with biases.

The rows of gate and up alternate in the checkpoint; here those of gate come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from aioinfer.checkpoint.tensors import QuantisedMatrix
from aioinfer.model.families.base import NormWeight, Source
from aioinfer.model.families.mixture import Mixture
from aioinfer.model.gates import LIMIT, STEEPNESS, Gate
from aioinfer.model.mixers.self_attention import SelfAttention
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.experts import ExpertWeights
from aioinfer.model.moe.routing import SoftmaxRouter
from aioinfer.model.moe.sparse import StoredExperts
from aioinfer.model.weights import rows_of

__all__ = ["AlternatingExperts", "GptOss"]


@dataclass(frozen=True, slots=True)
class AlternatingExperts(StoredExperts):
    """Experts with biases, stacked and transposed: ``gate_up_proj`` [num_experts, hidden, 2 * middle], of
    which every other column is one of gates, and ``down_proj`` [num_experts, middle, hidden]."""

    gate: Gate = "clamped_silu"

    def stacked(self) -> ExpertWeights:
        gate_up = self.weights.empty(self.num_experts, 2 * self.middle, self.hidden)
        down = self.weights.empty(self.num_experts, self.hidden, self.middle)
        for expert, (first, second) in enumerate(self.each()):
            gate_up[expert], down[expert] = first, second
        return ExpertWeights(gate_up, down, self.gate, self.biases())

    def each(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        gate_up, down = self._take("gate_up_proj"), self._take("down_proj")
        for expert in range(self.num_experts):
            rows = gate_up[expert].T
            yield torch.cat((rows[::2], rows[1::2])), down[expert].T.contiguous()

    def each_quantised(self) -> Iterator[tuple[QuantisedMatrix, QuantisedMatrix]]:
        order = torch.arange(2 * self.middle).view(-1, 2).T.flatten()
        for gate_up, down in StoredExperts.each_quantised(self):
            yield rows_of(gate_up, order), down

    def float8_blocks(self) -> None:
        """None: kernels do not read rows in another order, transposed."""

    def biases(self) -> tuple[torch.Tensor, torch.Tensor]:
        both = self._take("gate_up_proj_bias")
        return torch.cat((both[:, ::2], both[:, 1::2]), dim=1), self._take("down_proj_bias")

    def _take(self, name: str) -> torch.Tensor:
        return self.weights.take(f"{self.prefix}.{name}", self.shapes()[name])

    def shapes(self) -> dict[str, tuple[int, ...]]:
        count, hidden, middle = self.num_experts, self.hidden, self.middle
        return {
            "gate_up_proj": (count, hidden, 2 * middle),
            "gate_up_proj_bias": (count, 2 * middle),
            "down_proj": (count, middle, hidden),
            "down_proj_bias": (count, hidden),
        }


@dataclass(frozen=True, slots=True)
class GptOss(Mixture):
    """gpt-oss."""

    norm_weight: NormWeight = "exact"

    def unsupported_reason(self, config: Any) -> str | None:
        # Transformers 5.17 has no such fields, and computes these.
        steepness = getattr(config, "swiglu_alpha", STEEPNESS)
        limit = getattr(config, "swiglu_limit", LIMIT)
        if (steepness, limit) != (STEEPNESS, LIMIT):
            return f"gates of steepness {steepness} up to {limit}"
        return Mixture.unsupported_reason(self, config)

    def _attention(self, source: Source, index: int) -> SelfAttention:
        attention = Mixture._attention(self, source, index)
        name, heads = f"model.layers.{index}.self_attn.sinks", source.config.num_attention_heads
        attention.sinks = source.weights.take(name, (heads,), dtype=torch.float32)
        return attention

    def _mlp(self, source: Source, index: int) -> FeedForward:
        config, prefix, weights = source.config, f"model.layers.{index}.mlp", source.weights
        count, hidden = config.num_local_experts, config.hidden_size
        gates = weights.take(f"{prefix}.router.weight", (count, hidden))
        bias = weights.take(f"{prefix}.router.bias", (count,))
        rule = SoftmaxRouter(gates, config.num_experts_per_tok, normalize=True, bias=bias)
        sizes = count, hidden, config.intermediate_size
        stored: StoredExperts = AlternatingExperts(weights, f"{prefix}.experts", *sizes)
        if f"{prefix}.experts.gate_up_proj" not in weights:
            # A GGUF file has gates and inputs in a stack each.
            stored = StoredExperts(weights, f"{prefix}.experts", *sizes, gate="clamped_silu", biased=True)
        return source.kernels.sparse(rule, stored, None)
