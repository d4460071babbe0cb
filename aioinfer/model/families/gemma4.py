"""The text models of Gemma 4: Gemma 3 with layers that differ in their heads, and more parts to a layer.

Layers without a window have larger heads, fewer of them for keys, and may have their keys, before these are
normed and rotated, for values, too. The last layers may share the keys and values of those before them.
Values are normed. In small models every token has a vector for each layer (:mod:`aioinfer.model.per_layer`),
in others experts stand beside the dense part (:mod:`aioinfer.model.moe.dual`). In the end of a layer the
residual is scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aioinfer.errors import ConfigError
from aioinfer.model import rope
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.blocks import Blocks
from aioinfer.model.families.base import Family, Source, inner_sizes
from aioinfer.model.gates import CONFIG_GATES, Gate
from aioinfer.model.heads import HeadNorm
from aioinfer.model.layer import Embedding, Layer
from aioinfer.model.mixers.self_attention import SelfAttention
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.dual import DualMLP
from aioinfer.model.moe.routing import SoftmaxRouter
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.norm import Norm
from aioinfer.model.per_layer import PerLayerInputs, PerLayerPart
from aioinfer.model.weights import StoredMatrix

__all__ = ["Gemma4"]

#: name of the table of inputs by layer
_TABLE = "model.embed_tokens_per_layer"
_WINDOW, _GLOBAL = "sliding_attention", "full_attention"
#: tensors of keys and values that checkpoints may have for layers that share them
_KV_TENSORS = (
    "k_proj.weight",
    "k_proj.bias",
    "v_proj.weight",
    "v_proj.bias",
    "k_norm.weight",
    "v_norm.weight",
)


@dataclass(frozen=True, slots=True)
class Gemma4(Family):
    """Gemma 4."""

    blocks: Blocks | None = None

    def unsupported_reason(self, config: Any) -> str | None:
        if config.use_bidirectional_attention == "all":
            # Nor can transformers: its code computes a token from later ones.
            raise ConfigError("model: bidirectional attention is not supported")
        if other := set(config.layer_types) - {_WINDOW, _GLOBAL}:
            return f"layers of {', '.join(sorted(other))}"
        if config.hidden_activation not in CONFIG_GATES:
            return f"the activation {config.hidden_activation}"
        sizes = {shape.head_dim for shape in self.kv_layers(config)}
        return None if all(rope.supported(config, size) for size in sizes) else "its kind of rotary positions"

    def kv_layers(self, config: Any) -> tuple[KVShape, ...]:
        return tuple(_heads(config, index) for index in range(_first_shared(config)))

    def inner_sizes(self, config: Any) -> list[int]:
        return [*inner_sizes(config), *filter(None, [_per_layer_size(config)])]

    def sparse_layers(self, config: Any) -> frozenset[int]:
        if not getattr(config, "enable_moe_block", False):
            return frozenset()
        chosen, experts = config.top_k_experts or 0, config.num_experts or 0
        if not 1 <= chosen <= experts or not config.moe_intermediate_size:
            raise ConfigError(f"model: {chosen} of {experts} experts of size {config.moe_intermediate_size}")
        return frozenset(range(config.num_hidden_layers))

    def tables(self, config: Any) -> frozenset[str]:
        return frozenset({f"{_TABLE}.weight"}) if _per_layer_size(config) else frozenset()

    def layer(self, source: Source, index: int) -> Layer:
        prefix = f"model.layers.{index}"
        scale = source.weights.take(f"{prefix}.layer_scalar", (1,))
        before = (
            None
            if self.sparse_layers(source.config)
            else _norm(source, f"{prefix}.pre_feedforward_layernorm")
        )
        return Layer(
            mixer_norm=_norm(source, f"{prefix}.input_layernorm"),
            mixer=self._attention(source, index),
            mixer_post_norm=_norm(source, f"{prefix}.post_attention_layernorm"),
            mlp_norm=before,
            mlp=self._mlp(source, index),
            mlp_post_norm=_norm(source, f"{prefix}.post_feedforward_layernorm"),
            per_layer=self._per_layer(source, prefix),
            scale=scale.item(),
        )

    def embedding(self, source: Source) -> Embedding:
        config, dtype, hidden = source.config, source.weights.dtype, source.config.hidden_size
        scale, size = _root(hidden, dtype), _per_layer_size(config)
        if not size:
            return Embedding(scale=scale)
        words, layers = config.vocab_size_per_layer_input, config.num_hidden_layers
        if words < config.vocab_size:
            raise ConfigError(f"model: inputs by layer of {words} tokens for {config.vocab_size}")
        projection = source.linear(["model.per_layer_model_projection"], [layers * size], hidden, bias=False)
        norm = source.weights.take("model.per_layer_projection_norm.weight", (size,), dtype=torch.float32)
        inputs = PerLayerInputs(
            table=source.kernels.table(StoredMatrix(source.weights, [_TABLE], [words], layers * size)),
            projection=projection,
            norm=Norm(norm, config.rms_norm_eps),
            table_scale=_root(size, dtype),
            projection_scale=hidden**-0.5,
            sum_scale=2.0**-0.5,
            layers=layers,
        )
        return Embedding(scale=scale, per_layer=inputs)

    def final_norm(self, source: Source) -> Norm:
        return _norm(source, "model.norm")

    def logit_cap(self, config: Any) -> float | None:
        cap: float | None = config.final_logit_softcapping
        return cap

    def _attention(self, source: Source, index: int) -> SelfAttention:
        config, at = source.config, f"model.layers.{index}.self_attn"
        kv, heads = _heads(config, index), config.num_attention_heads
        (kv_heads, size, _), own = kv, _kv_layer(config, index)
        shared, window = own != index, config.layer_types[index] == _WINDOW
        names, rows = [f"{at}.q_proj"], [heads * size]
        if shared:
            for name in _KV_TENSORS:
                source.weights.leave(f"{at}.{name}")
        else:
            values = "k_proj" if config.attention_k_eq_v and not window else "v_proj"
            names, rows = (
                [*names, f"{at}.k_proj", f"{at}.{values}"],
                [*rows, kv_heads * size, kv_heads * size],
            )
        bias, hidden = config.attention_bias, config.hidden_size
        params = AttentionParams(
            1.0,
            window=config.sliding_window if window else None,
            shared=shared,
            spans=window and config.use_bidirectional_attention == "vision",
        )
        return SelfAttention(
            num_heads=heads,
            kv=kv,
            kv_layer=own,
            qkv=source.linear(names, rows, hidden, bias=bias),
            qk_norm=_head_norm(source, at, heads, kv, shared=shared),
            rope=source.rope(index, size),
            params=params,
            out=source.linear([f"{at}.o_proj"], [hidden], heads * size, bias=bias),
        )

    def _mlp(self, source: Source, index: int) -> FeedForward:
        config, prefix = source.config, f"model.layers.{index}"
        wide = config.use_double_wide_mlp and index >= _first_shared(config)
        middle = config.intermediate_size * (2 if wide else 1)
        dense = source.gated_mlp(f"{prefix}.mlp", middle, _gate(config))
        if not self.sparse_layers(config):
            return dense
        # The factor of what the router reads is that of the normed values.
        scale = source.weights.take(f"{prefix}.router.scale", (config.hidden_size,), dtype=torch.float32)
        return DualMLP(
            dense_norm=_norm(source, f"{prefix}.pre_feedforward_layernorm"),
            dense=dense,
            dense_post_norm=_norm(source, f"{prefix}.post_feedforward_layernorm_1"),
            router_norm=Norm(scale * config.hidden_size**-0.5, config.rms_norm_eps),
            experts_norm=_norm(source, f"{prefix}.pre_feedforward_layernorm_2"),
            sparse=_experts(source, prefix),
            experts_post_norm=_norm(source, f"{prefix}.post_feedforward_layernorm_2"),
            operations=source.kernels.operations,
        )

    def _per_layer(self, source: Source, prefix: str) -> PerLayerPart | None:
        config, hidden = source.config, source.config.hidden_size
        size = _per_layer_size(config)
        if not size:
            return None
        return PerLayerPart(
            gate=source.linear([f"{prefix}.per_layer_input_gate"], [size], hidden, bias=False),
            function=_gate(config),
            out=source.linear([f"{prefix}.per_layer_projection"], [hidden], size, bias=False),
            post_norm=_norm(source, f"{prefix}.post_per_layer_input_norm"),
        )


def _experts(source: Source, prefix: str) -> SparseMLP:
    config, weights, count = source.config, source.weights, source.config.num_experts
    rule = SoftmaxRouter(
        weights.take(f"{prefix}.router.proj.weight", (count, config.hidden_size)),
        config.top_k_experts,
        normalize=True,
        scales=weights.take(f"{prefix}.router.per_expert_scale", (count,), dtype=torch.float32),
    )
    sizes = count, config.hidden_size, config.moe_intermediate_size
    stored = StoredExperts(weights, f"{prefix}.experts", *sizes, gate=_gate(config))
    return source.kernels.sparse(rule, stored, None)


def _head_norm(source: Source, at: str, heads: int, kv: KVShape, *, shared: bool) -> HeadNorm:
    """Norm of queries, keys and values; that of values has no weight."""
    kv_heads, size, _ = kv
    weights = [source.weights.take(f"{at}.q_norm.weight", (size,), dtype=torch.float32).expand(heads, -1)]
    if not shared:
        key = source.weights.take(f"{at}.k_norm.weight", (size,), dtype=torch.float32)
        weights += [key.expand(kv_heads, -1), torch.ones_like(key).expand(kv_heads, -1)]
    return HeadNorm(torch.cat(weights), source.config.rms_norm_eps)


def _norm(source: Source, name: str) -> Norm:
    return source.norm(name, "exact")


def _gate(config: Any) -> Gate:
    return CONFIG_GATES[config.hidden_activation]


def _root(size: int, dtype: torch.dtype) -> float:
    return torch.tensor(size**0.5, dtype=dtype).item()


def _heads(config: Any, index: int) -> KVShape:
    layer = config.per_layer_config[index]
    return KVShape(layer.num_key_value_heads, layer.head_dim)


def _first_shared(config: Any) -> int:
    """Index of the first layer that shares keys and values. Raises ConfigError if all do."""
    layers: int = config.num_hidden_layers
    if config.num_kv_shared_layers >= layers:
        raise ConfigError(f"model: {config.num_kv_shared_layers} of {layers} layers share keys and values")
    return layers - int(config.num_kv_shared_layers)


def _kv_layer(config: Any, index: int) -> int:
    """The layer whose keys and values a layer has: its own, or the last of its type that has any. Raises
    ConfigError if there is none."""
    first, types = _first_shared(config), config.layer_types
    if index < first:
        return index
    own = [before for before in range(first) if types[before] == types[index]]
    if not own:
        raise ConfigError(
            f"model: no layer of {types[index]} has the keys and values that layer {index} shares"
        )
    return own[-1]


def _per_layer_size(config: Any) -> int:
    return getattr(config, "hidden_size_per_layer_input", None) or 0
