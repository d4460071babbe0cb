"""Qwen3-Next and Qwen3.5: the gated delta rule in most layers, and gated attention in the others.

Norms store their weights less one, but for those of the delta rule's results. The attention has a gate for
each element of its results, from the same projection as the queries, norms of each head's query and key, and
rotates a part of each head. The experts of some models go with a shared one, which a gate scales as a whole.
Qwen3.6 has the architecture of Qwen3.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.families.base import NormWeight, Source, head_dim, kv_heads
from aioinfer.model.families.mixture import Mixture
from aioinfer.model.linear import Linear
from aioinfer.model.mixers.base import Mixer
from aioinfer.model.mixers.delta_rule import DeltaHeads, DeltaRule
from aioinfer.model.mixers.self_attention import SelfAttention
from aioinfer.model.mixers.short_conv import LONGEST

__all__ = ["Qwen3Next"]

_ATTENTION, _DELTA_RULE = "full_attention", "linear_attention"


@dataclass(frozen=True, slots=True)
class Qwen3Next(Mixture):
    """Qwen3-Next and Qwen3.5."""

    norm_weight: NormWeight = "offset"
    partial_rotary: bool = True
    layer_types: frozenset[str] = frozenset({_ATTENTION, _DELTA_RULE})
    experts: Literal["none", "config", "all"] = "none"
    shared: str | None = "mlp.shared_expert"
    #: whether the projections of a layer of the delta rule are stored by key head, in two tensors; in GGUF
    #: files only the second one is
    by_key_head: bool = False

    def unsupported_reason(self, config: Any) -> str | None:
        if config.hidden_act != "silu":
            return f"the activation {config.hidden_act}"
        if not 2 <= config.linear_conv_kernel_dim <= LONGEST:
            return f"convolutions over {config.linear_conv_kernel_dim} positions"
        values, keys = config.linear_num_value_heads, config.linear_num_key_heads
        if values % keys:
            raise ConfigError(f"model: {values} heads of values are no multiple of {keys} heads of keys")
        if not self.kv_layers(config):
            return "no attention at all"
        return Mixture.unsupported_reason(self, config)

    def kv_layers(self, config: Any) -> tuple[KVShape, ...]:
        return (KVShape(kv_heads(config), head_dim(config)),) * _types(config).count(_ATTENTION)

    def recurrent(self, config: Any) -> bool:
        return _DELTA_RULE in _types(config)

    def inner_sizes(self, config: Any) -> list[int]:
        sizes = Mixture.inner_sizes(self, config)
        return [*sizes, config.linear_key_head_dim, config.linear_value_head_dim]

    def unread(self, config: Any, name: str) -> bool:
        """Whether a tensor belongs to the layers that predict further tokens."""
        return name.startswith("mtp.")

    def _mixer(self, source: Source, index: int) -> Mixer:
        if source.config.layer_types[index] == _DELTA_RULE:
            return self._delta_rule(source, f"model.layers.{index}.linear_attn")
        return self._attention(source, index)

    def _attention(self, source: Source, index: int) -> SelfAttention:
        config, at, size = source.config, f"model.layers.{index}.self_attn", head_dim(source.config)
        q_rows, kv_rows = config.num_attention_heads * size, kv_heads(config) * size
        bias = bool(config.attention_bias)
        names, rows = [f"{at}.{name}_proj" for name in "qkv"], [2 * q_rows, kv_rows, kv_rows]
        # Of each head the rows of its query are in front of those of its gate.
        queries, gates = torch.arange(2 * q_rows).view(-1, 2, size).unbind(1)
        keys_values = torch.arange(2 * q_rows, 2 * q_rows + 2 * kv_rows)
        order = torch.cat((queries.flatten(), keys_values, gates.flatten()))
        return source.attention(
            config.layer_types[:index].count(_ATTENTION),
            qkv=source.linear(names, rows, config.hidden_size, bias=bias, order=order),
            gated=True,
            qk_norm=source.head_norm(f"{at}.q_norm", f"{at}.k_norm", self.norm_weight),
            rope=source.rope(index),
            params=self._attention_params(source, index),
            out=source.linear([f"{at}.o_proj"], [config.hidden_size], q_rows, bias=bias),
        )

    def _delta_rule(self, source: Source, at: str) -> DeltaRule:
        config, weights = source.config, source.weights
        heads = DeltaHeads(
            config.linear_num_key_heads,
            config.linear_num_value_heads,
            config.linear_key_head_dim,
            config.linear_value_head_dim,
        )
        into, gates = self._delta_projections(source, at, heads)
        conv = source.conv(f"{at}.conv1d", heads.channels, config.linear_conv_kernel_dim)
        state = len(source.states)
        source.states.append(heads.state_shape)
        count = (heads.value_heads,)
        return DeltaRule(
            heads=heads,
            into=into,
            gates=gates,
            conv=conv,
            rate=weights.take(f"{at}.A_log", count, dtype=torch.float32).exp(),
            bias=weights.take(f"{at}.dt_bias", count, dtype=torch.float32),
            norm=weights.take(f"{at}.norm.weight", (heads.value_dim,), dtype=torch.float32),
            eps=config.rms_norm_eps,
            out=source.linear([f"{at}.out_proj"], [config.hidden_size], heads.values, bias=False),
            state=state,
        )

    def _delta_projections(self, source: Source, at: str, heads: DeltaHeads) -> tuple[Linear, Linear]:
        """To queries, keys, values and gates of the results; and to strengths and decays, which are not
        rounded: they are few, and all of a state depends on them."""
        hidden, group = source.config.hidden_size, heads.value_heads // heads.key_heads
        if self.by_key_head and f"{at}.in_proj_qkvz.weight" in source.weights:
            parts = [heads.key_dim, heads.key_dim, group * heads.value_dim, group * heads.value_dim]
            rows, order = [heads.channels + heads.values], _by_part(heads.key_heads, parts)
            into = source.linear([f"{at}.in_proj_qkvz"], rows, hidden, bias=False, order=order)
        else:
            names, rows = [f"{at}.in_proj_qkv", f"{at}.in_proj_z"], [heads.channels, heads.values]
            into = source.linear(names, rows, hidden, bias=False)
        if self.by_key_head:
            rows, order = [2 * heads.value_heads], _by_part(heads.key_heads, [group, group])
            return into, source.linear(
                [f"{at}.in_proj_ba"], rows, hidden, bias=False, order=order, exact=True
            )
        names, rows = [f"{at}.in_proj_b", f"{at}.in_proj_a"], [heads.value_heads] * 2
        return into, source.linear(names, rows, hidden, bias=False, exact=True)


def _types(config: Any) -> list[str]:
    types: list[str] = config.layer_types[: config.num_hidden_layers]
    return types


def _by_part(heads: int, parts: list[int]) -> torch.Tensor:
    """The order by part of rows that are stored head by head, with ``parts`` rows of each part."""
    rows = torch.arange(heads * sum(parts)).view(heads, -1)
    return torch.cat([part.flatten() for part in rows.split(parts, dim=1)])
