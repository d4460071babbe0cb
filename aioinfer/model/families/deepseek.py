"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437; Kimi K2's is a config of V3), GLM-4.7-Flash, MiniCPM3 and
Youtu-LLM: attention over latents (MLA).

The first layers are dense, the others have routed and shared experts; MiniCPM3 and Youtu-LLM have none.
Tensors of layers behind the last one, which predict further tokens, are not read.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch

from aioinfer.checkpoint.tensors import Rounding
from aioinfer.errors import ConfigError
from aioinfer.model import rope
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.families.base import Family, Source, expert_count, factor, inner_sizes
from aioinfer.model.gates import CONFIG_GATES
from aioinfer.model.layer import Embedding, Layer
from aioinfer.model.mixers.latent_attention import LatentAttention
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.routing import GroupedSigmoidRouter
from aioinfer.model.norm import Norm
from aioinfer.model.weights import StoredMatrix, Weights

__all__ = ["DeepSeek"]

#: of the norms of latents, whatever the config says of others
_EPS = 1e-6
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class DeepSeek(Family):
    """Families with latents, by their differences."""

    #: the scores of experts; "none": there are no experts
    experts: Literal["sigmoid", "softmax", "none"] = "sigmoid"
    #: whether the dimensions that are rotated together are 2i and 2i + 1; None: the config says so
    interleaved: bool | None = None

    def unsupported_reason(self, config: Any) -> str | None:
        if not rope.supported(config, config.qk_rope_head_dim):
            return "its kind of rotary positions"
        if config.hidden_act not in CONFIG_GATES or (self.experts != "none" and config.hidden_act != "silu"):
            return f"the activation {config.hidden_act}"
        if getattr(config, "mlp_bias", False) or (config.attention_bias and config.q_lora_rank is None):
            return "biases in parts that have none in any checkpoint"
        method = getattr(config, "topk_method", None)
        if self.experts == "softmax" and method not in ("greedy", "group_limited_greedy"):
            return f"experts chosen by {method}"
        return None

    def kv_layers(self, config: Any) -> tuple[KVShape, ...]:
        rank, layers = config.kv_lora_rank, int(config.num_hidden_layers)
        return (KVShape(1, rank + config.qk_rope_head_dim, rank),) * layers

    def sparse_layers(self, config: Any) -> frozenset[int]:
        layers = range(config.num_hidden_layers)
        if self.experts == "none" or not expert_count(config):
            return frozenset()
        kinds = getattr(config, "mlp_layer_types", None)
        if kinds is None:
            return frozenset(layers[config.first_k_dense_replace or 0 :])
        if len(kinds) < len(layers):
            raise ConfigError(f"model: mlp_layer_types of the config has {len(kinds)} entries")
        return frozenset(layer for layer in layers if kinds[layer] == "sparse")

    def inner_sizes(self, config: Any) -> list[int]:
        rank, value_dim = config.kv_lora_rank, config.v_head_dim
        parts = config.qk_nope_head_dim, config.qk_rope_head_dim, config.q_lora_rank or 0
        # Panels of the products of heads are two vectors wide.
        return [*inner_sizes(config), *parts, rank, rank // 2, value_dim, value_dim // 2]

    def unread(self, config: Any, name: str) -> bool:
        # Layers behind the last one predict further tokens; GGUF has names of its own for some parts.
        found, first = _LAYER.match(name), config.num_hidden_layers
        count = getattr(config, "num_nextn_predict_layers", None) or 0
        return ".nextn." in name or (found is not None and first <= int(found[1]) < first + count)

    def embedding(self, source: Source) -> Embedding:
        return Embedding(scale=factor(source.config, "scale_emb"))

    def logit_scale(self, config: Any) -> float:
        base: int | None = getattr(config, "dim_model_base", None)
        return 1.0 if base is None else base / config.hidden_size

    def layer(self, source: Source, index: int) -> Layer:
        config, prefix = source.config, f"model.layers.{index}"
        depth: float | None = getattr(config, "scale_depth", None)
        return Layer(
            mixer_norm=source.norm(f"{prefix}.input_layernorm"),
            mixer=self._attention(source, index),
            mlp_norm=source.norm(f"{prefix}.post_attention_layernorm"),
            mlp=self._mlp(source, index),
            part_scale=1.0 if depth is None else depth / math.sqrt(config.num_hidden_layers),
        )

    def _attention(self, source: Source, index: int) -> LatentAttention:
        config, at = source.config, f"model.layers.{index}.self_attn"
        heads, plain, rotated = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        rank, value_dim, low = config.kv_lora_rank, config.v_head_dim, config.q_lora_rank
        hidden, bias, query_rows = config.hidden_size, config.attention_bias, heads * (plain + rotated)
        interleaved = config.rope_interleave if self.interleaved is None else self.interleaved
        turned = _turned(heads, plain, rotated) if interleaved else None
        first, order = ("q_proj", query_rows) if low is None else ("q_a_proj", low), None
        if turned is not None:
            own = turned if low is None else torch.arange(low)
            order = torch.cat((own, _turned(1, rank, rotated) + len(own)))
        into = source.linear(
            [f"{at}.{first[0]}", f"{at}.kv_a_proj_with_mqa"],
            [first[1], rank + rotated],
            hidden,
            bias=bias,
            order=order,
        )
        queries = query_norm = None
        if low is not None:
            query_norm = Norm(source.weights.take(f"{at}.q_a_layernorm.weight", (low,)), _EPS)
            queries = source.linear([f"{at}.q_b_proj"], [query_rows], low, bias=False, order=turned)
        absorb, expand = _head_parts(source.weights, at, heads, plain, value_dim, rank)
        return LatentAttention(
            num_heads=heads,
            kv=self.kv_layers(config)[index],
            kv_layer=index,
            plain=plain,
            value_dim=value_dim,
            into=into,
            query_norm=query_norm,
            queries=queries,
            latent_norm=Norm(source.weights.take(f"{at}.kv_a_layernorm.weight", (rank,)), _EPS),
            rope=source.rope(index, rotated),
            params=AttentionParams(_scale(config, plain + rotated)),
            absorb=source.kernels.by_head(absorb, heads),
            expand=source.kernels.by_head(expand, heads),
            out=source.linear([f"{at}.o_proj"], [hidden], heads * value_dim, bias=bias),
        )

    def _mlp(self, source: Source, index: int) -> FeedForward:
        config, prefix = source.config, f"model.layers.{index}.mlp"
        if index not in self.sparse_layers(config):
            return source.gated_mlp(prefix, config.intermediate_size, CONFIG_GATES[config.hidden_act])
        shared = None
        if config.n_shared_experts:
            middle = config.moe_intermediate_size * config.n_shared_experts
            shared = source.gated_mlp(f"{prefix}.shared_experts", middle)
        return source.sparse(self._rule(source, prefix), f"{prefix}.experts", shared)

    def _rule(self, source: Source, prefix: str) -> GroupedSigmoidRouter:
        config, softmax = source.config, self.experts == "softmax"
        groups, chosen = config.n_group or 1, config.topk_group or 1
        if softmax and config.topk_method == "greedy":
            groups = chosen = 1
        normalize = not softmax and config.norm_topk_prob
        bias = None if softmax else "gate.e_score_correction_bias"
        rule = {"num_groups": groups, "top_groups": chosen, "normalize": normalize, "softmax": softmax}
        return source.sigmoid_rule(prefix, bias, **rule)


def _head_parts(
    weights: Weights, at: str, heads: int, plain: int, value_dim: int, rank: int
) -> tuple[StoredMatrix, StoredMatrix]:
    """The products of heads into the space of latents and out of it; GGUF files have two tensors of them."""
    if f"{at}.kv_b_proj.weight" not in weights and f"{at}.k_b_proj.weight" in weights:
        keys = StoredMatrix(weights, [f"{at}.k_b_proj"], [heads * rank], plain)
        return keys, StoredMatrix(weights, [f"{at}.v_b_proj"], [heads * value_dim], rank)
    sizes = weights, at, heads, plain, value_dim, rank
    return _HeadParts(*sizes, keys=True), _HeadParts(*sizes, keys=False)


class _HeadParts(StoredMatrix):
    """A part of each head of the projection out of latents: that to keys as the one of queries into their
    space, [heads * rank, plain], or that to values, [heads * value_dim, rank]. It is read dequantised."""

    __slots__ = ("_heads", "_keys", "_plain")

    def __init__(
        self, weights: Weights, at: str, heads: int, plain: int, value_dim: int, rank: int, *, keys: bool
    ) -> None:
        super().__init__(weights, [f"{at}.kv_b_proj"], [heads * (plain + value_dim)], rank)
        self._heads, self._plain, self._keys = heads, plain, keys
        self.shape = (heads * rank, plain) if keys else (heads * value_dim, rank)

    @property
    def name(self) -> str:
        return f"{self.names[0]} {'keys' if self._keys else 'values'}"

    @property
    def rounding(self) -> Rounding | None:
        return None

    def load(self) -> torch.Tensor:
        heads = super().load().view(self._heads, -1, self._width)
        part = heads[:, : self._plain].mT if self._keys else heads[:, self._plain :]
        return part.reshape(self.shape)

    def view(self) -> torch.Tensor:
        return self.load()


def _turned(heads: int, plain: int, rotated: int) -> torch.Tensor:
    """Rows of heads in an order that puts the first of two dimensions that are rotated together into the
    first half of the rotated ones."""
    order = torch.arange(plain + rotated)
    order[plain:] = plain + torch.arange(rotated).view(-1, 2).T.flatten()
    return (torch.arange(heads)[:, None] * (plain + rotated) + order).flatten()


def _scale(config: Any, size: int) -> float:
    """Factor of scores; YaRN has its own for all dimensions, beside that of the rotated ones."""
    parameters, scale = config.rope_parameters, float(size**-0.5)
    every = parameters.get("mscale_all_dim") or 0.0
    if parameters.get("rope_type", "default") == "default" or not every:
        return scale
    length = max(1.0, parameters["factor"])
    return scale * (0.1 * every * math.log(length) + 1.0) ** 2
