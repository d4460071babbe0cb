"""Nemotron-H (arXiv 2504.03624), Nemotron Nano: a state space, attention or a feed-forward part a layer.

Attention does not rotate: the state spaces know the order. Feed-forward parts have no gates, and square what
is above 0. A layer of the config with such a part is the second half of the layer before it, which may also
have none.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.families.base import Family, Source, head_dim, kv_heads
from aioinfer.model.families.hybrid import ATTENTION, STATE_SPACE, mamba2, unsupported_steps
from aioinfer.model.gates import PLAIN_GATES
from aioinfer.model.layer import Layer
from aioinfer.model.mixers.base import Mixer
from aioinfer.model.mixers.mamba2 import MambaHeads
from aioinfer.model.mlp import FeedForward
from aioinfer.model.norm import Norm

__all__ = ["NemotronH"]

_MLP = "mlp"


@dataclass(frozen=True, slots=True)
class NemotronH(Family):
    """Nemotron-H."""

    def unsupported_reason(self, config: Any) -> str | None:
        types = config.layer_types
        if other := set(types) - {ATTENTION, STATE_SPACE, _MLP}:
            return f"layers of {', '.join(sorted(other))}"
        if any(part == _MLP == before for before, part in zip([_MLP, *types], types, strict=False)):
            return "a feed-forward part behind no mixer"
        if not self.kv_layers(config):
            return "no attention at all"
        if config.mlp_hidden_act not in PLAIN_GATES or config.mamba_hidden_act != "silu":
            return f"the activations {config.mlp_hidden_act} and {config.mamba_hidden_act}"
        return unsupported_steps(config, _heads(config), config.conv_kernel)

    def kv_layers(self, config: Any) -> tuple[KVShape, ...]:
        count: int = config.layer_types.count(ATTENTION)
        return (KVShape(kv_heads(config), head_dim(config)),) * count

    def recurrent(self, config: Any) -> bool:
        return STATE_SPACE in config.layer_types

    def inner_sizes(self, config: Any) -> list[int]:
        heads = _heads(config)
        sizes = [config.hidden_size, heads.head_dim, heads.state_size, heads.values // heads.groups]
        return [*sizes, config.intermediate_size] if _MLP in config.layer_types else sizes

    def unread(self, config: Any, name: str) -> bool:
        """Whether a tensor belongs to the layers that predict further tokens."""
        return name.startswith("mtp.")

    def words(self, names: Container[str]) -> str:
        return f"{_prefix(names)}.embeddings"

    def final_norm(self, source: Source) -> Norm:
        return source.norm(f"{_prefix(source.weights)}.norm_f", "exact")

    def layer(self, source: Source, index: int) -> Layer | None:
        types, prefix = source.config.layer_types, f"{_prefix(source.weights)}.layers"
        if types[index] == _MLP:
            return None
        mlp, behind = None, index + 1
        mixer = self._mixer(source, index, f"{prefix}.{index}.mixer")
        if types[behind : behind + 1] == [_MLP]:
            mlp = self._mlp(source, f"{prefix}.{behind}.mixer")
        return Layer(
            mixer_norm=source.norm(f"{prefix}.{index}.norm", "exact"),
            mixer=mixer,
            mlp_norm=None if mlp is None else source.norm(f"{prefix}.{behind}.norm", "exact"),
            mlp=mlp,
        )

    def _mixer(self, source: Source, index: int, at: str) -> Mixer:
        config, size = source.config, head_dim(source.config)
        if config.layer_types[index] == STATE_SPACE:
            return mamba2(
                source,
                at,
                _heads(config),
                size=config.conv_kernel,
                conv_bias=config.use_conv_bias,
                biases=(config.use_bias,) * 2,
                eps=config.layer_norm_epsilon,
            )
        rows = [config.num_attention_heads * size, *[kv_heads(config) * size] * 2]
        names = [f"{at}.{name}_proj" for name in "qkv"]
        return source.attention(
            config.layer_types[:index].count(ATTENTION),
            qkv=source.linear(names, rows, config.hidden_size, bias=False),
            rope=None,
            params=AttentionParams(size**-0.5),
            out=source.linear([f"{at}.o_proj"], [config.hidden_size], rows[0], bias=False),
        )

    def _mlp(self, source: Source, at: str) -> FeedForward:
        config, gate = source.config, PLAIN_GATES[source.config.mlp_hidden_act]
        names = ("up_proj", "down_proj")
        return source.plain_mlp(at, names, config.intermediate_size, gate, bias=config.mlp_bias)


def _heads(config: Any) -> MambaHeads:
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
    return MambaHeads(*(getattr(config, name) for name in names))


def _prefix(names: Container[str]) -> str:
    """That of releases, or of what transformers calls the same."""
    return "backbone" if "backbone.embeddings.weight" in names else "model"
