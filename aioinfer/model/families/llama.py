"""Llama and the families with its tensor names: Mistral, Qwen2, Qwen3, Qwen3-MoE, Phi-3, SDAR.

They differ in biases, a norm on each head's query and key (Qwen3), attention windows (Mistral, some Qwen
layers), experts instead of one feed-forward part (Qwen3-MoE), fused projections (Phi-3, Phi-4), and blocks
(SDAR, arXiv 2510.06303: a Qwen3 trained further to denoise blocks). A tensor that the family requires and the
checkpoint lacks is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from aioinfer.errors import ConfigError
from aioinfer.model import rope
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.blocks import Blocks
from aioinfer.model.decoder import Layer
from aioinfer.model.families.base import Source, head_dim, kv_heads
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.routing import SoftmaxRouter

__all__ = ["LlamaLike"]

_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True, slots=True)
class LlamaLike:
    """See :class:`~aioinfer.model.families.base.Family`."""

    #: biases of the attention's projections: none, those of queries, keys and values, or as the config states
    attention_bias: Literal["none", "qkv", "config"] = "none"
    #: whether the config states if the feed-forward part has biases; else it has none
    mlp_bias: bool = False
    #: whether each head's query and key are normed
    qk_norm: bool = False
    #: layers with the config's attention window: none, all, or those that the config names
    windows: Literal["none", "all", "config"] = "none"
    #: whether layers may have experts
    experts: bool = False
    #: whether queries, keys and values are one tensor, and gate and up another
    fused: bool = False
    #: whether the config may have a part of each head rotated only
    partial_rotary: bool = False
    blocks: Blocks | None = None
    embedding: str = "model.embed_tokens.weight"

    def unsupported_reason(self, config: Any) -> str | None:
        """See :class:`~aioinfer.model.families.base.Family`."""
        if not rope.supported(config, head_dim(config), partial=self.partial_rotary):
            return "its kind of rotary positions"
        if config.hidden_act != "silu":
            return f"the activation {config.hidden_act}"
        other = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
        return f"layers of {', '.join(sorted(other))}" if other else None

    def sparse_layers(self, config: Any) -> frozenset[int]:
        """See :class:`~aioinfer.model.families.base.Family`."""
        if not self.experts or not config.num_experts:
            return frozenset()
        step, chosen = config.decoder_sparse_step, config.num_experts_per_tok
        if step < 1 or not 1 <= chosen <= config.num_experts:
            raise ConfigError(f"model: {chosen} of {config.num_experts} experts in every {step}th layer")
        layers = range(step - 1, config.num_hidden_layers, step)
        return frozenset(layers) - frozenset(config.mlp_only_layers or ())

    def layer(self, source: Source, index: int) -> Layer:
        """See :class:`~aioinfer.model.families.base.Family`."""
        config, prefix = source.config, f"model.layers.{index}"
        hidden, size = config.hidden_size, head_dim(config)
        q_rows, kv_rows = config.num_attention_heads * size, kv_heads(config) * size
        at = f"{prefix}.self_attn"
        every = self.attention_bias == "config" and config.attention_bias
        names, rows = [f"{at}.{name}_proj" for name in "qkv"], [q_rows, kv_rows, kv_rows]
        if self.fused:
            names, rows = [f"{at}.qkv_proj"], [sum(rows)]
        qkv = source.linear(names, rows, hidden, bias=every or self.attention_bias == "qkv")
        out = source.linear([f"{at}.o_proj"], [hidden], q_rows, bias=every)
        return Layer(
            attention_norm=source.weights.take(f"{prefix}.input_layernorm.weight", (hidden,)),
            qkv=qkv,
            qk_norm=source.head_norm(f"{at}.q_norm", f"{at}.k_norm") if self.qk_norm else None,
            attention_params=AttentionParams(
                scale=size**-0.5, window=self._window(config, index), block=source.block
            ),
            out=out,
            mlp_norm=source.weights.take(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
            mlp=self._mlp(source, index),
        )

    def _mlp(self, source: Source, index: int) -> FeedForward:
        config, prefix = source.config, f"model.layers.{index}.mlp"
        if source.experts is None or index not in self.sparse_layers(config):
            bias = self.mlp_bias and config.mlp_bias
            return source.swiglu(prefix, config.intermediate_size, bias=bias, fused=self.fused)
        gate = source.weights.take(f"{prefix}.gate.weight", (config.num_experts, config.hidden_size))
        rule = SoftmaxRouter(gate, config.num_experts_per_tok, config.norm_topk_prob)
        return source.sparse(rule, f"{prefix}.experts")

    def _window(self, config: Any, index: int) -> int | None:
        """Length of the layer's attention window in positions; None for none."""
        if self.windows == "none":
            return None
        if self.windows == "config" and config.layer_types[index] != "sliding_attention":
            return None
        window: int | None = config.sliding_window
        return window
