"""Families with the state space of Mamba-2: Granite 4 H, Bamba and Falcon-H1; Nemotron-H has its own file.

Granite 4 H and Bamba have attention in a few layers and a state space in the others, Falcon-H1 has both side
by side in every layer. Granite scales what the parts add, and its attention need not rotate; Bamba rotates
half of each head. Falcon-H1 scales the inputs and outputs of each part and of their halves; here most of
these factors are moved to where there is one already: products without biases are linear.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from aioinfer.errors import ConfigError, shown
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.families.base import Source, factor, head_dim, kv_heads, own
from aioinfer.model.families.llama import PRE_NORMS, LayerNorms, LlamaLike
from aioinfer.model.layer import Layer
from aioinfer.model.mixers.base import Mixer
from aioinfer.model.mixers.mamba2 import Mamba2, MambaHeads
from aioinfer.model.mixers.short_conv import LONGEST
from aioinfer.model.mixers.side_by_side import SideBySide
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.routing import SoftmaxRouter
from aioinfer.model.moe.sparse import GATE_UP_DOWN
from aioinfer.model.rope import Rope

__all__ = ["ATTENTION", "STATE_SPACE", "Bamba", "FalconH1", "GraniteHybrid", "mamba2", "unsupported_steps"]

ATTENTION, STATE_SPACE = "full_attention", "linear_attention"
_PRE_FF = LayerNorms(mlp="pre_ff_layernorm")


def unsupported_steps(config: Any, heads: MambaHeads, size: int) -> str | None:
    """What of a config's state spaces is not supported, in words; ``size``: positions of its convolutions.
    Raises ConfigError for heads that do not fit."""
    if heads.heads % heads.groups:
        raise ConfigError(
            f"model: {heads.heads} heads of a state space do not divide into {heads.groups} groups"
        )
    if not 2 <= size <= LONGEST:
        return f"convolutions over {size} positions"
    limit = own(config, "time_step_limit")
    return None if limit is None or tuple(limit) == (0.0, math.inf) else f"steps limited to {limit}"


def mamba2(
    source: Source,
    at: str,
    heads: MambaHeads,
    *,
    size: int,
    conv_bias: bool,
    biases: tuple[bool, bool],
    eps: float,
    norm: bool = True,
) -> Mamba2:
    """The state space under ``at``. Adds its states to those of the model.

    Args:
        size: positions of its convolution.
        biases: whether the projections before and behind it have some.
    """
    config, weights, count = source.config, source.weights, (heads.heads,)
    first, last = biases
    conv = source.conv(f"{at}.conv1d", heads.channels, size, bias=conv_bias)
    source.states.append(heads.state_shape)

    def take(name: str, shape: tuple[int, ...] = count) -> torch.Tensor:
        return weights.take(f"{at}.{name}", shape, dtype=torch.float32)

    return Mamba2(
        heads=heads,
        into=source.linear([f"{at}.in_proj"], [heads.width], config.hidden_size, bias=first),
        conv=conv,
        bias=take("dt_bias"),
        rate=take("A_log").exp(),
        skip=take("D"),
        norm=take("norm.weight", (heads.values,)) if norm else None,
        eps=eps,
        out=source.linear([f"{at}.out_proj"], [config.hidden_size], heads.values, bias=last),
        state=conv.state + 1,
    )


@dataclass(frozen=True, slots=True)
class Bamba(LlamaLike):
    """Bamba: attention in the layers that the config names, else state spaces."""

    norms: LayerNorms = _PRE_FF
    last_norm: str = "final_layernorm"
    partial_rotary: bool = True
    layer_types: frozenset[str] = frozenset({ATTENTION, STATE_SPACE})

    def unsupported_reason(self, config: Any) -> str | None:
        if self._activation(config) != "silu":
            return f"the activation {self._activation(config)}"
        reason = None
        if self.recurrent(config):
            reason = unsupported_steps(config, self._heads(config), config.mamba_d_conv)
        if not self.kv_layers(config):
            reason = "no attention at all"
        return reason or LlamaLike.unsupported_reason(self, config)

    def kv_layers(self, config: Any) -> tuple[KVShape, ...]:
        return (KVShape(kv_heads(config), head_dim(config)),) * _types(config).count(ATTENTION)

    def recurrent(self, config: Any) -> bool:
        return STATE_SPACE in _types(config)

    def inner_sizes(self, config: Any) -> list[int]:
        sizes = [config.hidden_size, *self._middles(config)]
        if not self.recurrent(config):
            return sizes
        heads = self._heads(config)
        return [*sizes, heads.head_dim, heads.state_size, heads.values // heads.groups]

    def _middles(self, config: Any) -> list[int]:
        """Inner dimensions of feed-forward parts."""
        return [config.intermediate_size]

    def _heads(self, config: Any) -> MambaHeads:
        names = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state")
        return MambaHeads(*(getattr(config, name) for name in names))

    def _mamba(self, source: Source, index: int) -> Mamba2:
        config = source.config
        return mamba2(
            source,
            f"model.layers.{index}.mamba",
            self._heads(config),
            size=config.mamba_d_conv,
            conv_bias=config.mamba_conv_bias,
            biases=(config.mamba_proj_bias,) * 2,
            eps=config.rms_norm_eps,
        )

    def _mixer(self, source: Source, index: int) -> Mixer:
        types = _types(source.config)
        if types[index] == STATE_SPACE:
            return self._mamba(source, index)
        attention = self._attention(source, index)
        attention.kv_layer = types[:index].count(ATTENTION)
        return attention

    def _mlp(self, source: Source, index: int) -> FeedForward:
        config = source.config
        prefix, bias = f"model.layers.{index}.feed_forward", bool(config.mlp_bias)
        return source.gated_mlp(prefix, config.intermediate_size, bias=bias)


@dataclass(frozen=True, slots=True)
class GraniteHybrid(Bamba):
    """Granite 4 H, and Granite 4 without state spaces: a dense part in every layer, beside which there may be
    experts."""

    norms: LayerNorms = PRE_NORMS
    last_norm: str = "norm"

    def sparse_layers(self, config: Any) -> frozenset[int]:
        count, chosen = config.num_local_experts or 0, config.num_experts_per_tok or 0
        if count and not 1 <= chosen <= count:
            raise ConfigError(f"model: {chosen} of {count} experts")
        return frozenset(range(config.num_hidden_layers if count else 0))

    def _middles(self, config: Any) -> list[int]:
        of_experts = [config.intermediate_size] if self.sparse_layers(config) else []
        return [config.shared_intermediate_size, *of_experts]

    def _rope(self, source: Source, index: int) -> Rope | None:
        return source.rope(index) if source.config.position_embedding_type == "rope" else None

    def _mlp(self, source: Source, index: int) -> FeedForward:
        config, at = source.config, f"model.layers.{index}"
        sparse = index in self.sparse_layers(config)
        names: tuple[str, ...] = ("input_linear", "output_linear")
        if f"{at}.shared_mlp.{names[0]}.weight" not in source.weights:
            # GGUF files have gate and up in two tensors.
            names = GATE_UP_DOWN
        middle = config.shared_intermediate_size
        shared = source.gated_mlp(f"{at}.shared_mlp", middle, names=names)
        return self._experts(source, f"{at}.block_sparse_moe", shared) if sparse else shared

    def _experts(self, source: Source, at: str, shared: FeedForward) -> FeedForward:
        config, together = source.config, ("input_linear.weight", "output_linear.weight")
        shape = config.num_local_experts, config.hidden_size
        gates = source.weights.take(f"{at}.router.layer.weight", shape)
        rule = SoftmaxRouter(gates, config.num_experts_per_tok, normalize=True)
        if f"{at}.{together[0]}" in source.weights:
            return source.sparse(rule, at, shared, together=together)
        return source.sparse(rule, f"{at}.experts", shared)


@dataclass(frozen=True, slots=True)
class FalconH1(Bamba):
    """Falcon-H1."""

    layer_types: frozenset[str] = frozenset({"hybrid"})

    def unsupported_reason(self, config: Any) -> str | None:
        if self._activation(config) != "silu":
            return f"the activation {self._activation(config)}"
        if config.attention_bias or config.mlp_bias or config.mamba_proj_bias:
            return "biases in front of factors"
        if config.mamba_rms_norm and config.mamba_norm_before_gate:
            return "a norm in front of the gates of its state spaces"
        for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
            factors = getattr(config, name)
            numbers = all(type(each) in (int, float) and 0 < each < math.inf for each in factors)
            if not (numbers and len(factors) == count):
                found = shown(factors)
                raise ConfigError(
                    f"model: {name} of the config must be {count} positive numbers, got {found}"
                )
        return unsupported_steps(config, self._heads(config), config.mamba_d_conv) or (
            LlamaLike.unsupported_reason(self, config)
        )

    def kv_layers(self, config: Any) -> tuple[KVShape, ...]:
        return LlamaLike.kv_layers(self, config)

    def recurrent(self, config: Any) -> bool:
        return True

    def logit_scale(self, config: Any) -> float:
        return factor(config, "lm_head_multiplier")

    def layer(self, source: Source, index: int) -> Layer:
        """``down(silu(g * gate(x)) * up(x)) * d`` is ``down(silu(gate(g * x)) * up(g * x)) * (d / g)``: the
        norm in front has g."""
        layer, (gate, down) = LlamaLike.layer(self, source, index), source.config.mlp_multipliers
        assert layer.mlp_norm is not None
        layer.mlp_norm = replace(layer.mlp_norm, weight=layer.mlp_norm.weight.float() * gate)
        layer.part_scale = down / gate
        mixer = layer.mixer
        assert isinstance(mixer, SideBySide)
        mixer.mamba_scale /= layer.part_scale
        mixer.attention_scale /= layer.part_scale
        return layer

    def _mixer(self, source: Source, index: int) -> SideBySide:
        config = source.config
        attention = self._attention(source, index)
        inner = config.attention_in_multiplier
        attention.params = AttentionParams(
            head_dim(config) ** -0.5 * inner * inner * config.key_multiplier, block=source.block
        )
        return SideBySide(
            mamba=self._mamba(source, index),
            attention=attention,
            mamba_scale=config.ssm_out_multiplier,
            # Values are linear in their inputs, and so are the results.
            attention_scale=inner * config.attention_out_multiplier,
        )

    def _mamba(self, source: Source, index: int) -> Mamba2:
        config, heads = source.config, self._heads(source.config)
        made = mamba2(
            source,
            f"model.layers.{index}.mamba",
            heads,
            size=config.mamba_d_conv,
            conv_bias=config.mamba_conv_bias,
            biases=(False, config.projectors_bias),
            eps=config.rms_norm_eps,
            norm=config.mamba_rms_norm,
        )
        gate, x, b, c, step = (each * config.ssm_in_multiplier for each in config.ssm_multipliers)
        of_group = heads.groups * heads.state_size
        channels = torch.tensor([x, b, c]).repeat_interleave(torch.tensor([heads.values, of_group, of_group]))
        made.conv.weight = made.conv.weight * channels.to(made.conv.weight)
        made.gate_scale, made.step_scale = gate, step
        return made


def _types(config: Any) -> list[str]:
    types: list[str] = config.layer_types[: config.num_hidden_layers]
    return types
