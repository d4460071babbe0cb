"""Nemotron-H (arXiv 2504.03624), Nemotron Nano: a state space, attention or a feed-forward part a layer.

Attention does not rotate: the state spaces know the order. Feed-forward parts have no gates, and square what
is above 0. A layer of the config with such a part is the second half of the layer before it, which may also
have none.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from aioinfer.errors import ConfigError
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.attention.pool import KVShape
from aioinfer.model.families.base import Family, Source, expert_count, head_dim, kv_heads
from aioinfer.model.families.hybrid import ATTENTION, STATE_SPACE, mamba2, unsupported_steps
from aioinfer.model.gates import PLAIN_GATES
from aioinfer.model.layer import Layer
from aioinfer.model.mixers.base import Mixer
from aioinfer.model.mixers.mamba2 import MambaHeads
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.sparse import StoredExperts
from aioinfer.model.norm import Norm

__all__ = ["NemotronH"]

_MLP, _MOE = "mlp", "moe"
#: names of the tensors of a feed-forward part
_UP_DOWN = ("up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class NemotronH(Family):
    """Nemotron-H."""

    def unsupported_reason(self, config: Any) -> str | None:
        types = config.layer_types
        if other := set(types) - {ATTENTION, STATE_SPACE, _MLP, _MOE}:
            return f"layers of {', '.join(sorted(other))}"
        mixes = [part not in (_MLP, _MOE) for part in types]
        if not all(map(max, mixes, [False, *mixes])):
            return "a feed-forward part behind no mixer"
        if self.sparse_layers(config) and config.moe_latent_size:
            return "experts with inputs of a size of their own"
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

    def sparse_layers(self, config: Any) -> frozenset[int]:
        found = frozenset(index for index, part in enumerate(config.layer_types) if part == _MOE)
        chosen, count = config.num_experts_per_tok, expert_count(config)
        if found and not 1 <= chosen <= count:
            raise ConfigError(f"model: {chosen} of {count} experts")
        return found

    def inner_sizes(self, config: Any) -> list[int]:
        heads = _heads(config)
        sizes = [config.hidden_size, heads.head_dim, heads.state_size, heads.values // heads.groups]
        if _MLP in config.layer_types:
            sizes.append(config.intermediate_size)
        if self.sparse_layers(config):
            sizes += [config.moe_intermediate_size, config.moe_shared_expert_intermediate_size]
        return sizes

    def unread(self, config: Any, name: str) -> bool:
        """Whether a tensor belongs to the layers that predict further tokens."""
        return name.startswith("mtp.")

    def words(self, names: Container[str]) -> str:
        return f"{_prefix(names)}.embeddings"

    def final_norm(self, source: Source) -> Norm:
        return source.norm(f"{_prefix(source.weights)}.norm_f", "exact")

    def layer(self, source: Source, index: int) -> Layer | None:
        types, prefix = source.config.layer_types, f"{_prefix(source.weights)}.layers"
        if types[index] in (_MLP, _MOE):
            return None
        mlp, behind = None, index + 1
        mixer = self._mixer(source, index, f"{prefix}.{index}.mixer")
        if behind < len(types) and types[behind] in (_MLP, _MOE):
            mlp = self._mlp(source, behind, f"{prefix}.{behind}.mixer")
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

    def _mlp(self, source: Source, index: int, at: str) -> FeedForward:
        config, gate = source.config, PLAIN_GATES[source.config.mlp_hidden_act]
        form: dict[str, Any] = {"bias": config.mlp_bias}
        if index not in self.sparse_layers(config):
            return source.plain_mlp(at, _UP_DOWN, config.intermediate_size, gate, **form)
        groups = {"num_groups": config.n_group, "top_groups": config.topk_group}
        bias, normalize = "gate.e_score_correction_bias", config.norm_topk_prob
        rule = source.sigmoid_rule(at, bias, normalize=normalize, **groups)
        middle = config.moe_shared_expert_intermediate_size
        shared = source.plain_mlp(f"{at}.shared_experts", _UP_DOWN, middle, gate, **form)
        sizes = expert_count(config), config.hidden_size, config.moe_intermediate_size
        stored = StoredExperts(*(source.weights, f"{at}.experts", *sizes, _UP_DOWN, gate), together=_UP_DOWN)
        return source.kernels.sparse(rule, stored, shared)


def _heads(config: Any) -> MambaHeads:
    names = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size")
    return MambaHeads(*(getattr(config, name) for name in names))


def _prefix(names: Container[str]) -> str:
    """That of releases, or of what transformers calls the same."""
    return "backbone" if "backbone.embeddings.weight" in names else "model"
