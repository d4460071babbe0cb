"""DenseLM: the Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE families in one file.

They differ in four places: biases on q, k and v (Qwen2), a norm on each head's query and key (Qwen3),
attention windows (Mistral, some Qwen layers), and experts instead of one feed-forward part (Qwen3-MoE;
the name of the class is that of the others). The architecture and its config say which; what they
call for and the checkpoint lacks is an error, not an option.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from aioinfer.model.attention.base import Attention, Scoring
from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm
from aioinfer.model.mlp import FeedForward, SwiGLU
from aioinfer.model.moe.choice import Wanted, choose_experts
from aioinfer.model.moe.qwen3 import expert_shape, load_sparse_mlp, sparse_layers
from aioinfer.model.operations.base import Operations
from aioinfer.model.rope import Rope, Rotary
from aioinfer.model.spec import ModelSpec, eos_token_ids
from aioinfer.model.weights import Weights

__all__ = ["DenseLM"]


@dataclass(slots=True)
class _Layer:
    attention_norm: torch.Tensor
    #: queries, keys and values of all heads in one matrix
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: HeadNorm | None
    scoring: Scoring
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: FeedForward


class DenseLM:
    """A decoder of pre-norm attention and SwiGLU layers. See :class:`~aioinfer.model.spec.CausalLM`."""

    capturable = True

    def __init__(
        self,
        path: Path,
        config: Any,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        operations: Operations,
        experts: Wanted = "auto",
    ) -> None:
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._heads = config.num_attention_heads
        self._kv_heads = getattr(config, "num_key_value_heads", None) or self._heads
        self._head_dim = head_dim
        self._eps = config.rms_norm_eps
        self._family = config.model_type
        self._operations = operations
        shape = expert_shape(config)
        self._experts = choose_experts(device, *shape, dtype, experts) if shape else None
        self._rope = Rope(config, head_dim, config.max_position_embeddings, dtype, device)
        hidden = config.hidden_size
        self._embedding = weights.take("model.embed_tokens.weight", (config.vocab_size, hidden))
        self._layers = [self._load_layer(config, weights, index) for index in range(config.num_hidden_layers)]
        self._norm = weights.take("model.norm.weight", (hidden,))
        ignore = []
        if config.tie_word_embeddings:
            self._head = self._embedding
            ignore = ["lm_head.weight"]
        else:
            self._head = weights.take("lm_head.weight", (config.vocab_size, hidden))
        weights.check_all_taken(ignore)
        self.spec = ModelSpec(
            architecture=config.architectures[0],
            num_layers=config.num_hidden_layers,
            num_heads=self._heads,
            num_kv_heads=self._kv_heads,
            head_dim=head_dim,
            hidden_size=hidden,
            vocab_size=config.vocab_size,
            max_model_len=config.max_position_embeddings,
            dtype=dtype,
            eos_token_ids=eos_token_ids(path, config),
            num_parameters=weights.num_parameters,
            expert_kernels=self._experts.kernels if self._experts else None,
        )

    def _load_layer(self, config: Any, weights: Weights, index: int) -> _Layer:
        prefix = f"model.layers.{index}"
        hidden = config.hidden_size
        q_rows, kv_rows = self._heads * self._head_dim, self._kv_heads * self._head_dim
        projections = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        rows = [q_rows, kv_rows, kv_rows]
        # Of these families only Llama and the Qwen3s ask the config; Qwen2 has q, k, v biases and no other.
        qwen3 = self._family in ("qwen3", "qwen3_moe")
        attention_bias = (qwen3 or self._family == "llama") and config.attention_bias
        return _Layer(
            attention_norm=weights.take(f"{prefix}.input_layernorm.weight", (hidden,)),
            qkv=weights.fused([f"{name}.weight" for name in projections], rows, hidden),
            qkv_bias=_fused_bias(weights, projections, rows, attention_bias or self._family == "qwen2"),
            qk_norm=self._load_qk_norm(weights, f"{prefix}.self_attn") if qwen3 else None,
            scoring=Scoring(scale=self._head_dim**-0.5, window=_window(config, index)),
            out=weights.take(f"{prefix}.self_attn.o_proj.weight", (hidden, q_rows)),
            out_bias=_fused_bias(weights, [f"{prefix}.self_attn.o_proj"], [hidden], attention_bias),
            mlp_norm=weights.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            mlp=self._load_mlp(config, weights, index),
        )

    def _load_mlp(self, config: Any, weights: Weights, index: int) -> FeedForward:
        prefix = f"model.layers.{index}.mlp"
        if self._experts is not None and index in sparse_layers(config):
            return load_sparse_mlp(config, weights, prefix, self._experts)
        hidden, middle = config.hidden_size, config.intermediate_size
        both = [f"{prefix}.{name}_proj" for name in ("gate", "up")]
        bias = self._family == "llama" and config.mlp_bias
        return SwiGLU(
            gate_up=weights.fused([f"{name}.weight" for name in both], [middle, middle], hidden),
            gate_up_bias=_fused_bias(weights, both, [middle, middle], bias),
            down=weights.take(f"{prefix}.down_proj.weight", (hidden, middle)),
            down_bias=_fused_bias(weights, [f"{prefix}.down_proj"], [hidden], bias),
            operations=self._operations,
        )

    def _load_qk_norm(self, weights: Weights, prefix: str) -> HeadNorm:
        q_norm = weights.take(f"{prefix}.q_norm.weight", (self._head_dim,))
        k_norm = weights.take(f"{prefix}.k_norm.weight", (self._head_dim,))
        both = torch.cat((q_norm.expand(self._heads, -1), k_norm.expand(self._kv_heads, -1)))
        return HeadNorm(both, self._eps)

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        norm, eps = self._operations.add_rms_norm, self._eps
        rotary = self._rope.at(batch.positions)
        hidden = F.embedding(batch.input_ids, self._embedding)
        # What a part of a layer adds to the residual is added where the next one norms it.
        delta = None
        for index, layer in enumerate(self._layers):
            hidden, normed = norm(hidden, delta, layer.attention_norm, eps)
            delta = self._attend(index, layer, normed, rotary, batch, attention)
            hidden, normed = norm(hidden, delta, layer.mlp_norm, eps)
            delta = layer.mlp(normed)
        rows = batch.logits_rows
        _, normed = norm(hidden[rows], None if delta is None else delta[rows], self._norm, eps)
        return F.linear(normed, self._head)

    def _attend(
        self,
        index: int,
        layer: _Layer,
        normed: torch.Tensor,
        rotary: Rotary,
        batch: Batch,
        attention: Attention,
    ) -> torch.Tensor:
        shape = len(normed), self._heads + 2 * self._kv_heads, self._head_dim
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(shape)
        mixed = attention.fused(index, qkv, layer.qk_norm, rotary, batch, layer.scoring)
        return F.linear(mixed.flatten(1), layer.out, layer.out_bias)


def _fused_bias(weights: Weights, names: list[str], rows: list[int], present: bool) -> torch.Tensor | None:
    return weights.fused([f"{name}.bias" for name in names], rows) if present else None


def _window(config: Any, index: int) -> int | None:
    """Positions that a layer looks back on, or None for all of them."""
    if config.model_type == "llama":
        return None
    in_every_layer = config.model_type in ("mistral", "qwen3_moe")
    if not in_every_layer and config.layer_types[index] != "sliding_attention":
        return None
    window: int | None = config.sliding_window
    return window
