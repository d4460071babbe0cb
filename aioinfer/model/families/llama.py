"""Llama and its variants: Mistral, Qwen, Phi, OLMo, GLM-4, Granite, Cohere, EXAONE 4, and more.

They differ in biases, norms of queries and keys (of each head: Qwen3, of all heads: OLMo, once they are
rotated: Hunyuan), norms after the parts of a layer (OLMo, GLM-4), layer norms (StarCoder2, Cohere), parts
that read the same residual (Cohere, Phi), attention windows (Mistral, OLMo 3), layers without rotation
(SmolLM3, EXAONE 4), rotated pairs that are side by side (GLM-4), feed-forward parts without gates
(StarCoder2), fused projections (Phi-3), factors (Granite), and blocks (SDAR, arXiv 2510.06303: a Qwen3
trained further to denoise blocks). A tensor that the family requires and the checkpoint lacks is an error.
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
from aioinfer.model.gates import CONFIG_GATES, PLAIN_GATES
from aioinfer.model.heads import HeadNorm
from aioinfer.model.layer import Embedding, Layer
from aioinfer.model.linear import Linear
from aioinfer.model.mixers.base import Mixer
from aioinfer.model.mixers.self_attention import Growth, SelfAttention
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.sparse import GATE_UP_DOWN
from aioinfer.model.norm import Norm
from aioinfer.model.rope import Rope

__all__ = ["POST_NORMS", "PRE_NORMS", "SANDWICH_NORMS", "Biases", "LayerNorms", "LlamaLike"]

_WINDOW = "sliding_attention"
_LAYER_TYPES = frozenset({"full_attention", _WINDOW})
#: which projections have biases: none, those of queries, keys and values, these as the config states, all as
#: it states, or all
Biases = Literal["none", "qkv", "qkv-config", "config", "all"]


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

    attention_bias: Biases = "none"
    #: whether the projections of the feed-forward part have biases, or the config states it
    mlp_bias: Literal["none", "config", "all"] = "none"
    #: whether queries and keys are normed: each head by itself, as the config states, all heads as one
    #: vector, or each head once it is rotated
    qk_norm: Literal["none", "heads", "config", "whole", "rotated"] = "none"
    #: how the weights of norms are stored
    norm_weight: NormWeight = "rounded"
    #: whether norms of the residual are layer norms, with biases or without
    layer_norm: Literal["none", "biased", "plain"] = "none"
    norms: LayerNorms = PRE_NORMS
    #: whether both parts of a layer read the norm of the same residual, or the config states it
    parallel: Literal["none", "config", "all"] = "none"
    #: layers with the config's attention window: none, all, or those that the config names
    windows: Literal["none", "all", "config"] = "none"
    #: whether, of a config that names layers with windows, only these are rotated
    local_rotary: bool = False
    #: whether queries may grow with their position
    growing: bool = False
    #: whether logits are multiplied by the config's logits_scaling, not divided by it
    multiplied_logits: bool = False
    #: whether queries, keys and values are one tensor
    fused_qkv: bool = False
    #: names of the tensors of gate, up and down, or of both and down
    gated_names: tuple[str, ...] = GATE_UP_DOWN
    #: names of the two tensors of a feed-forward part without gates; None: it has some
    plain_names: tuple[str, str] | None = None
    #: whether the config may have a part of each head rotated only
    partial_rotary: bool = False
    #: whether the dimensions that are rotated together are 2i and 2i + 1, not i and i + half
    interleaved_rotary: bool = False
    #: names of the projection behind the attention and of the last norm, whether a head has a bias
    out_name: str = "o_proj"
    last_norm: str = "norm"
    biased_head: bool = False
    blocks: Blocks | None = None
    #: the config's names of the layers that there are
    layer_types: frozenset[str] = _LAYER_TYPES

    def unsupported_reason(self, config: Any) -> str | None:
        if not rope.supported(config, head_dim(config), partial=self.partial_rotary):
            return "its kind of rotary positions"
        activation, rotated = self._activation(config), own(config, "no_rope_layers")
        if activation not in (PLAIN_GATES if self.plain_names else CONFIG_GATES):
            return f"the activation {activation}"
        if rotated and len(rotated) < config.num_hidden_layers:
            found = f"{len(rotated)} entries for {config.num_hidden_layers} layers"
            raise ConfigError(f"model: no_rope_layers of the config has {found}")
        for name, has in (("use_qk_norm", self.qk_norm), ("use_bias", self.attention_bias)):
            if has == "none" and own(config, name):
                return name
        for name in ("clip_qkv", "qk_layernorm"):
            if own(config, name):
                return name
        if self.biased_head and config.tie_word_embeddings:
            return "a tied head with a bias"
        other = set(getattr(config, "layer_types", None) or ()) - self.layer_types
        return f"layers of {', '.join(sorted(other))}" if other else None

    def head_bias(self, config: Any) -> bool:
        return self.biased_head

    def embedding(self, source: Source) -> Embedding:
        return Embedding(scale=factor(source.config, "embedding_multiplier"))

    def logit_scale(self, config: Any) -> float:
        scaling = factor(config, "logits_scaling")
        return factor(config, "logit_scale") * (scaling if self.multiplied_logits else 1 / scaling)

    def final_norm(self, source: Source) -> Norm:
        return self._norm(source, f"model.{self.last_norm}")

    def layer(self, source: Source, index: int) -> Layer:
        config, names = source.config, self.norms
        parallel = self.parallel == "all" or (self.parallel == "config" and config.use_parallel_residual)
        if parallel:
            names = names._replace(mlp=None)
        if own(config, "use_post_norm") is False:
            names = names._replace(attention_post=None, mlp_post=None)
        norms = [
            None if name is None else self._norm(source, f"model.layers.{index}.{name}") for name in names
        ]
        return Layer(
            mixer_norm=norms[0],
            mixer=self._mixer(source, index),
            mixer_post_norm=norms[1],
            mlp_norm=norms[0] if parallel else norms[2],
            mlp=self._mlp(source, index),
            mlp_post_norm=norms[3],
            parallel=parallel,
            part_scale=factor(config, "residual_multiplier"),
        )

    def _norm(self, source: Source, name: str) -> Norm:
        if self.layer_norm == "none":
            return source.norm(name, self.norm_weight)
        offset = self.norm_weight == "offset"
        return source.layer_norm(name, bias=self.layer_norm == "biased", offset=offset)

    def _mixer(self, source: Source, index: int) -> Mixer:
        return self._attention(source, index)

    def _attention(self, source: Source, index: int) -> SelfAttention:
        at = f"model.layers.{index}.self_attn"
        qkv, out = self._projections(source, at)
        return source.attention(
            index,
            qkv=qkv,
            qk_norm=self._head_norm(source, at),
            rope=self._rope(source, index),
            params=self._attention_params(source, index),
            growth=_growth(source.config) if self.growing else None,
            out=out,
        )

    def _head_norm(self, source: Source, at: str) -> HeadNorm | None:
        kind = self.qk_norm
        if kind == "none" or (kind == "config" and not source.config.use_qk_norm):
            return None
        if kind == "rotated":
            return source.head_norm(f"{at}.query_layernorm", f"{at}.key_layernorm", last=True)
        return source.head_norm(f"{at}.q_norm", f"{at}.k_norm", self.norm_weight, whole=kind == "whole")

    def _projections(self, source: Source, at: str) -> tuple[Linear, Linear]:
        """To queries, keys and values, and back to the residual."""
        config, size = source.config, head_dim(source.config)
        hidden, q_rows, kv_rows = (
            config.hidden_size,
            config.num_attention_heads * size,
            kv_heads(config) * size,
        )
        stated = _states(config, "attention_bias", "use_bias", "qkv_bias", "use_qkv_bias")
        every = self.attention_bias == "all" or (self.attention_bias == "config" and stated)
        some = self.attention_bias == "qkv" or (self.attention_bias == "qkv-config" and stated)
        names, rows = [f"{at}.{name}_proj" for name in "qkv"], [q_rows, kv_rows, kv_rows]
        if self.fused_qkv:
            names, rows = [f"{at}.qkv_proj"], [sum(rows)]
        order = _halves_apart(config) if self.interleaved_rotary else None
        qkv = source.linear(names, rows, hidden, bias=every or some, order=order)
        bias = every or _states(config, "attention_out_bias")
        return qkv, source.linear([f"{at}.{self.out_name}"], [hidden], q_rows, bias=bias)

    def _rope(self, source: Source, index: int) -> Rope | None:
        """The rotation of a layer; SmolLM3 states the layers that have one."""
        config, rotated = source.config, own(source.config, "no_rope_layers")
        if rotated and not rotated[index]:
            return None
        if self.local_rotary and config.sliding_window and config.layer_types[index] != _WINDOW:
            return None
        return source.rope(index)

    def _attention_params(self, source: Source, index: int) -> AttentionParams:
        scale = own(source.config, "attention_multiplier") or head_dim(source.config) ** -0.5
        return AttentionParams(scale, window=self._window(source.config, index), block=source.block)

    def _mlp(self, source: Source, index: int) -> FeedForward:
        config, prefix = source.config, f"model.layers.{index}.mlp"
        stated = self.mlp_bias == "config" and _states(config, "mlp_bias", "use_bias")
        bias, activation, middle = (
            self.mlp_bias == "all" or stated,
            self._activation(config),
            config.intermediate_size,
        )
        if self.plain_names is not None:
            return source.plain_mlp(prefix, self.plain_names, middle, PLAIN_GATES[activation], bias=bias)
        gate = CONFIG_GATES[activation]
        return source.gated_mlp(prefix, middle, gate, bias=bias, names=self.gated_names)

    def _activation(self, config: Any) -> str:
        name: str = config.hidden_act
        return name

    def _window(self, config: Any, index: int) -> int | None:
        """Length of the layer's attention window in positions; None for none."""
        if self.windows == "none":
            return None
        if self.windows == "config" and config.layer_types[index] != _WINDOW:
            return None
        window: int | None = config.sliding_window
        return window or None


def _states(config: Any, *names: str) -> bool:
    """Whether one of these fields of the config's class is set."""
    return any(own(config, name) for name in names)


def _growth(config: Any) -> Growth | None:
    """Raises ConfigError for growth from no length on."""
    parameters = config.rope_parameters
    rate, length = (
        parameters.get("llama_4_scaling_beta"),
        parameters.get("original_max_position_embeddings"),
    )
    if rate and not length:
        raise ConfigError("model: llama_4_scaling_beta needs original_max_position_embeddings beside it")
    return Growth(float(rate), length) if rate else None


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
