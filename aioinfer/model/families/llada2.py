"""LLaDA2 (arXiv 2512.15745): block diffusion over the architecture of Ling 2.0, sigmoid experts in groups.

A layer has one fused projection ``query_key_value`` (all query heads, then keys, then values), a norm on each
head's query and key, and rotary positions on a part of each head. The first layers are dense; the others
have routed and shared experts.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from aioinfer.errors import ConfigError
from aioinfer.model import rope
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.blocks import Blocks
from aioinfer.model.families.base import Family, Source, head_dim, kv_heads
from aioinfer.model.layer import Layer
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.routing import GroupedSigmoidRouter

__all__ = ["LLaDA2"]


class LLaDA2(Family):
    """LLaDA2."""

    blocks = Blocks(32, 156895)

    def words(self, names: Container[str]) -> str:
        return "model.word_embeddings"

    def unsupported_reason(self, config: Any) -> str | None:
        if not rope.supported(config, head_dim(config), partial=True):
            return "its kind of rotary positions"
        if config.hidden_act != "silu":
            return f"the activation {config.hidden_act}"
        if config.score_function != "sigmoid":
            return f"routing by {config.score_function}"
        return "a normed head" if config.norm_head else None

    def sparse_layers(self, config: Any) -> frozenset[int]:
        if not config.num_experts:
            return frozenset()
        return frozenset(range(config.first_k_dense_replace, config.num_hidden_layers))

    def layer(self, source: Source, index: int) -> Layer:
        config, prefix = source.config, f"model.layers.{index}"
        hidden, size = config.hidden_size, head_dim(config)
        q_rows = config.num_attention_heads * size
        at = f"{prefix}.attention"
        rows = q_rows + 2 * kv_heads(config) * size
        qkv = source.linear([f"{at}.query_key_value"], [rows], hidden, bias=config.use_qkv_bias)
        out = source.linear([f"{at}.dense"], [hidden], q_rows, bias=config.use_bias)
        norms = f"{at}.query_layernorm", f"{at}.key_layernorm"
        attention = source.attention(
            index,
            qkv=qkv,
            qk_norm=source.head_norm(*norms) if config.use_qk_norm else None,
            rope=source.rope(index),
            params=AttentionParams(scale=size**-0.5, block=source.block),
            out=out,
        )
        return Layer(
            mixer_norm=source.norm(f"{prefix}.input_layernorm"),
            mixer=attention,
            mlp_norm=source.norm(f"{prefix}.post_attention_layernorm"),
            mlp=self._mlp(source, index),
        )

    def _mlp(self, source: Source, index: int) -> FeedForward:
        config, prefix = source.config, f"model.layers.{index}.mlp"
        if index not in self.sparse_layers(config):
            return source.gated_mlp(prefix, config.intermediate_size)
        middle, count = config.moe_intermediate_size, config.num_shared_experts
        shared = None
        if count:
            shared = source.gated_mlp(f"{prefix}.shared_experts", middle * count)
        return source.sparse(_rule(source, prefix), f"{prefix}.experts", shared)


def _rule(source: Source, prefix: str) -> GroupedSigmoidRouter:
    config = source.config
    groups = {"num_groups": config.n_group, "top_groups": config.topk_group}
    if config.expert_capacity is not None:
        trained = LLaDA2.blocks.size if config.block_size is None else config.block_size
        if source.block != trained:
            raise ConfigError(f"block_size: {config.architectures[0]} chooses experts by blocks of {trained}")
        groups |= {"capacity": config.expert_capacity, "block": trained}
    # A single expert keeps its score as its weight.
    normalize = config.norm_topk_prob and config.num_experts_per_tok > 1
    bias = "gate.expert_bias" if config.moe_router_enable_expert_bias else None
    return source.sigmoid_rule(prefix, bias, normalize=normalize, **groups)
