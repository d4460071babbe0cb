"""LFM2 (arXiv 2511.23404): short convolutions, with attention in some layers; and its mixture of experts.

A layer of attention norms each head's query and key. The experts of LFM2-MoE are chosen as those of
DeepSeek-V3, by sigmoids, of one group; its first layers are dense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from aioinfer.errors import ConfigError
from aioinfer.model import rope
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.families.base import Family, Source, head_dim, inner_sizes, kv_heads
from aioinfer.model.layer import Layer
from aioinfer.model.mixers.base import Mixer
from aioinfer.model.mixers.short_conv import LONGEST, ShortConv
from aioinfer.model.mlp import FeedForward
from aioinfer.model.norm import Norm

__all__ = ["Lfm2"]

_ATTENTION, _CONV = "full_attention", "conv"
#: gate, up and down
_NAMES = ("w1", "w3", "w2")


@dataclass(frozen=True, slots=True)
class Lfm2(Family):
    """LFM2 and LFM2-MoE."""

    #: whether layers after the first ones have experts
    experts: bool = False

    def unsupported_reason(self, config: Any) -> str | None:
        if not rope.supported(config, head_dim(config)):
            return "its kind of rotary positions"
        if not 2 <= config.conv_L_cache <= LONGEST:
            return f"convolutions over {config.conv_L_cache} positions"
        other = set(_types(config)) - {_ATTENTION, _CONV}
        if other:
            return f"layers of {', '.join(sorted(other))}"
        return None if _ATTENTION in _types(config) else "no attention at all"

    def kv_layers(self, config: Any) -> tuple[KVShape, ...]:
        return (KVShape(kv_heads(config), head_dim(config)),) * _types(config).count(_ATTENTION)

    def recurrent(self, config: Any) -> bool:
        return _CONV in _types(config)

    def sparse_layers(self, config: Any) -> frozenset[int]:
        if not self.experts:
            return frozenset()
        chosen, count = config.num_experts_per_tok, config.num_experts
        if chosen > count:
            raise ConfigError(f"model: {chosen} of {count} experts")
        return frozenset(range(config.num_dense_layers, config.num_hidden_layers))

    def inner_sizes(self, config: Any) -> list[int]:
        if self.experts:
            return inner_sizes(config)
        return [config.hidden_size, self._middle(config)]

    def final_norm(self, source: Source) -> Norm:
        return source.norm("model.embedding_norm")

    def layer(self, source: Source, index: int) -> Layer:
        config, prefix = source.config, f"model.layers.{index}"
        attention = config.layer_types[index] == _ATTENTION
        return Layer(
            mixer_norm=source.norm(f"{prefix}.operator_norm"),
            mixer=_attention(source, index) if attention else _conv(source, f"{prefix}.conv"),
            mlp_norm=source.norm(f"{prefix}.ffn_norm"),
            mlp=self._mlp(source, index),
        )

    def _mlp(self, source: Source, index: int) -> FeedForward:
        config, prefix = source.config, f"model.layers.{index}.feed_forward"
        if index not in self.sparse_layers(config):
            return source.gated_mlp(prefix, self._middle(config), names=_NAMES)
        bias = "expert_bias" if config.use_expert_bias else None
        rule = source.sigmoid_rule(prefix, bias, num_groups=1, top_groups=1, normalize=config.norm_topk_prob)
        return source.sparse(rule, f"{prefix}.experts", names=_NAMES)

    def _middle(self, config: Any) -> int:
        """Inner dimension of a dense feed-forward part: a config states what it would be without gates."""
        size: int = config.intermediate_size
        if self.experts or not config.block_auto_adjust_ff_dim:
            return size
        size, factor, unit = int(2 * size / 3), config.block_ffn_dim_multiplier, config.block_multiple_of
        return size if factor is None else -(-int(factor * size) // unit) * unit


def _types(config: Any) -> list[str]:
    types: list[str] = config.layer_types[: config.num_hidden_layers]
    return types


def _attention(source: Source, index: int) -> Mixer:
    config, at, size = source.config, f"model.layers.{index}.self_attn", head_dim(source.config)
    q_rows, kv_rows = config.num_attention_heads * size, kv_heads(config) * size
    names, rows = [f"{at}.{name}_proj" for name in "qkv"], [q_rows, kv_rows, kv_rows]
    return source.attention(
        config.layer_types[:index].count(_ATTENTION),
        qkv=source.linear(names, rows, config.hidden_size, bias=False),
        qk_norm=source.head_norm(f"{at}.q_layernorm", f"{at}.k_layernorm"),
        rope=source.rope(index),
        params=AttentionParams(size**-0.5),
        out=source.linear([f"{at}.out_proj"], [config.hidden_size], q_rows, bias=False),
    )


def _conv(source: Source, at: str) -> ShortConv:
    config, hidden = source.config, source.config.hidden_size
    return ShortConv(
        into=source.linear([f"{at}.in_proj"], [3 * hidden], hidden, bias=config.conv_bias),
        conv=source.conv(f"{at}.conv", hidden, config.conv_L_cache, bias=config.conv_bias),
        out=source.linear([f"{at}.out_proj"], [hidden], hidden, bias=config.conv_bias),
    )
