"""Llama and its variants: Mistral, Qwen2, Qwen3, Qwen3-MoE, Phi-3, SmolLM3, OLMo 2 and 3, GLM-4, SDAR.

They differ in biases, norms of queries and keys (of each head: Qwen3, of all heads: OLMo), norms after the
parts of a layer (OLMo, GLM-4), attention windows (Mistral, some Qwen layers, OLMo 3), layers without rotation
(SmolLM3), rotated pairs that are side by side (GLM-4), experts instead of one feed-forward part (Qwen3-MoE),
fused projections (Phi-3, Phi-4, GLM-4), and blocks (SDAR, arXiv 2510.06303: a Qwen3 trained further to
denoise blocks). A tensor that the family requires and the checkpoint lacks is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from aioinfer.errors import ConfigError
from aioinfer.model import rope
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.blocks import Blocks
from aioinfer.model.families.base import Family, NormWeight, Source, factor, head_dim, kv_heads, own
from aioinfer.model.gates import CONFIG_GATES
from aioinfer.model.layer import Embedding, Layer
from aioinfer.model.linear import Linear
from aioinfer.model.mixers.base import Mixer
from aioinfer.model.mixers.self_attention import SelfAttention
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.routing import SoftmaxRouter
from aioinfer.model.norm import Norm
from aioinfer.model.rope import Rope

__all__ = ["POST_NORMS", "SANDWICH_NORMS", "LayerNorms", "LlamaLike"]

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


class LayerNorms(NamedTuple):
    """Names of the norms before and after the parts of a layer; None for none."""

    attention: str | None = "input_layernorm"
    attention_post: str | None = None
    mlp: str | None = "post_attention_layernorm"
    mlp_post: str | None = None


#: names in Llama
PRE_NORMS = LayerNorms()
#: names in OLMo 2
POST_NORMS = LayerNorms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
#: names in GLM-4
SANDWICH_NORMS = LayerNorms(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


@dataclass(frozen=True, slots=True)
class LlamaLike(Family):
    """Llama-like families, by their differences."""

    #: biases of the attention's projections: none, those of queries, keys and values, these as the config
    #: states, or all of them as it states
    attention_bias: Literal["none", "qkv", "qkv-config", "config"] = "none"
    #: whether the config states if the feed-forward part has biases; else it has none
    mlp_bias: bool = False
    #: whether queries and keys are normed: each head by itself, or all heads as one vector
    qk_norm: Literal["none", "heads", "whole"] = "none"
    #: how the weights of norms are stored
    norm_weight: NormWeight = "rounded"
    norms: LayerNorms = PRE_NORMS
    #: layers with the config's attention window: none, all, or those that the config names
    windows: Literal["none", "all", "config"] = "none"
    #: layers with experts: none, those that the config states, or all
    experts: Literal["none", "config", "all"] = "none"
    #: whether queries, keys and values are one tensor
    fused_qkv: bool = False
    #: whether gate and up are one tensor
    fused_mlp: bool = False
    #: whether the config may have a part of each head rotated only
    partial_rotary: bool = False
    #: whether the dimensions that are rotated together are 2i and 2i + 1, not i and i + half
    interleaved_rotary: bool = False
    blocks: Blocks | None = None
    #: the config's names of the layers that there are
    layer_types: frozenset[str] = _LAYER_TYPES

    def unsupported_reason(self, config: Any) -> str | None:
        if not rope.supported(config, head_dim(config), partial=self.partial_rotary):
            return "its kind of rotary positions"
        activation, rotated = self._activation(config), own(config, "no_rope_layers")
        if activation not in CONFIG_GATES:
            return f"the activation {activation}"
        if self._has_experts(config) and CONFIG_GATES[activation] != "silu":
            return f"experts with the activation {activation}"
        if rotated and len(rotated) < config.num_hidden_layers:
            found = f"{len(rotated)} entries for {config.num_hidden_layers} layers"
            raise ConfigError(f"model: no_rope_layers of the config has {found}")
        other = set(getattr(config, "layer_types", None) or ()) - self.layer_types
        return f"layers of {', '.join(sorted(other))}" if other else None

    def _has_experts(self, config: Any) -> bool:
        return self.experts == "all" or (self.experts == "config" and bool(config.num_experts))

    def sparse_layers(self, config: Any) -> frozenset[int]:
        if not self._has_experts(config):
            return frozenset()
        chosen, step, dense = config.num_experts_per_tok, 1, ()
        if self.experts == "config":
            step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
        if step < 1 or not 1 <= chosen <= config.num_experts:
            raise ConfigError(f"model: {chosen} of {config.num_experts} experts in every {step}th layer")
        return frozenset(range(step - 1, config.num_hidden_layers, step)) - frozenset(dense)

    def embedding(self, source: Source) -> Embedding:
        return Embedding(scale=factor(source.config, "embedding_multiplier"))

    def logit_scale(self, config: Any) -> float:
        return factor(config, "logit_scale") / factor(config, "logits_scaling")

    def final_norm(self, source: Source) -> Norm:
        return source.norm("model.norm", self.norm_weight)

    def layer(self, source: Source, index: int) -> Layer:
        prefix = f"model.layers.{index}"
        norms = [
            None if name is None else source.norm(f"{prefix}.{name}", self.norm_weight) for name in self.norms
        ]
        return Layer(
            mixer_norm=norms[0],
            mixer=self._mixer(source, index),
            mixer_post_norm=norms[1],
            mlp_norm=norms[2],
            mlp=self._mlp(source, index),
            mlp_post_norm=norms[3],
            part_scale=factor(source.config, "residual_multiplier"),
        )

    def _mixer(self, source: Source, index: int) -> Mixer:
        return self._attention(source, index)

    def _attention(self, source: Source, index: int) -> SelfAttention:
        at = f"model.layers.{index}.self_attn"
        qkv, out = self._projections(source, at)
        qk_norm = None
        if self.qk_norm != "none":
            names = f"{at}.q_norm", f"{at}.k_norm"
            qk_norm = source.head_norm(*names, self.norm_weight, whole=self.qk_norm == "whole")
        return source.attention(
            index,
            qkv=qkv,
            qk_norm=qk_norm,
            rope=self._rope(source, index),
            params=self._attention_params(source, index),
            out=out,
        )

    def _projections(self, source: Source, at: str) -> tuple[Linear, Linear]:
        """To queries, keys and values, and back to the residual."""
        config, size = source.config, head_dim(source.config)
        hidden, q_rows, kv_rows = (
            config.hidden_size,
            config.num_attention_heads * size,
            kv_heads(config) * size,
        )
        every = self.attention_bias == "config" and config.attention_bias
        some = self.attention_bias == "qkv-config" and config.attention_bias
        names, rows = [f"{at}.{name}_proj" for name in "qkv"], [q_rows, kv_rows, kv_rows]
        if self.fused_qkv:
            names, rows = [f"{at}.qkv_proj"], [sum(rows)]
        order = _halves_apart(config) if self.interleaved_rotary else None
        bias = every or some or self.attention_bias == "qkv"
        qkv = source.linear(names, rows, hidden, bias=bias, order=order)
        return qkv, source.linear([f"{at}.o_proj"], [hidden], q_rows, bias=every)

    def _rope(self, source: Source, index: int) -> Rope | None:
        """The rotation of a layer; SmolLM3 states the layers that have one."""
        rotated = own(source.config, "no_rope_layers")
        return source.rope(index) if not rotated or rotated[index] else None

    def _attention_params(self, source: Source, index: int) -> AttentionParams:
        scale = own(source.config, "attention_multiplier") or head_dim(source.config) ** -0.5
        return AttentionParams(scale, window=self._window(source.config, index), block=source.block)

    def _mlp(self, source: Source, index: int) -> FeedForward:
        config, prefix = source.config, f"model.layers.{index}.mlp"
        if index not in self.sparse_layers(config):
            bias, gate = self.mlp_bias and config.mlp_bias, CONFIG_GATES[self._activation(config)]
            return source.gated_mlp(prefix, config.intermediate_size, gate, bias=bias, fused=self.fused_mlp)
        gates = source.weights.take(f"{prefix}.gate.weight", (config.num_experts, config.hidden_size))
        rule = SoftmaxRouter(gates, config.num_experts_per_tok, config.norm_topk_prob)
        return source.sparse(rule, f"{prefix}.experts")

    def _activation(self, config: Any) -> str:
        name: str = config.hidden_act
        return name

    def _window(self, config: Any, index: int) -> int | None:
        """Length of the layer's attention window in positions; None for none."""
        if self.windows == "none":
            return None
        if self.windows == "config" and config.layer_types[index] != "sliding_attention":
            return None
        window: int | None = config.sliding_window
        return window or None


def _halves_apart(config: Any) -> torch.Tensor:
    """The rows of a projection to queries, keys and values in an order that puts the first of two dimensions
    that are rotated together into the first half of the rotated ones. Products of queries and keys stay the
    same."""
    size = head_dim(config)
    rotated = int(size * (config.rope_parameters.get("partial_rotary_factor") or 1.0))
    order = torch.arange(size)
    order[:rotated] = torch.arange(rotated).view(-1, 2).T.flatten()
    counts = config.num_attention_heads + kv_heads(config), kv_heads(config)
    turned, values = (
        torch.arange(count).repeat_interleave(size).view(count, size) * size for count in counts
    )
    return torch.cat(((turned + order).flatten(), (values + torch.arange(size) + counts[0] * size).flatten()))
