"""OPT (arXiv 2205.01068): layer norms, learned positions, and a feed-forward part without gates, of ReLU."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from aioinfer.errors import ConfigError
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.families.base import Family, Source, head_dim
from aioinfer.model.gates import PLAIN_GATES
from aioinfer.model.layer import Embedding, Layer
from aioinfer.model.norm import Norm

__all__ = ["OPT"]

_PREFIX = "model.decoder"
#: rows of the table of positions in front of that of the first position
_OFFSET = 2


class OPT(Family):
    """OPT."""

    def unsupported_reason(self, config: Any) -> str | None:
        hidden, heads = config.hidden_size, config.num_attention_heads
        if hidden % heads:
            raise ConfigError(f"model: hidden_size, {hidden}, is no multiple of {heads} heads")
        if not config.do_layer_norm_before or config._remove_final_layer_norm:
            return "norms behind its parts"
        if config.word_embed_proj_dim != hidden:
            return "vectors of tokens of another size"
        if not (config.enable_bias and config.layer_norm_elementwise_affine):
            return "no biases, or norms without weights"
        name = config.activation_function
        return None if name in PLAIN_GATES else f"the activation {name}"

    def inner_sizes(self, config: Any) -> list[int]:
        return [config.hidden_size, config.ffn_dim]

    def words(self, names: Container[str]) -> str:
        return f"{_PREFIX}.embed_tokens"

    def embedding(self, source: Source) -> Embedding:
        shape = (source.max_model_len + _OFFSET, source.config.hidden_size)
        return Embedding(positions=source.weights.take(f"{_PREFIX}.embed_positions.weight", shape)[_OFFSET:])

    def final_norm(self, source: Source) -> Norm:
        return source.layer_norm(f"{_PREFIX}.final_layer_norm")

    def layer(self, source: Source, index: int) -> Layer:
        config, prefix = source.config, f"{_PREFIX}.layers.{index}"
        hidden, at = config.hidden_size, f"{prefix}.self_attn"
        names = [f"{at}.{name}_proj" for name in "qkv"]
        attention = source.attention(
            index,
            qkv=source.linear(names, [hidden] * 3, hidden, bias=True),
            rope=None,
            params=AttentionParams(head_dim(config) ** -0.5, block=source.block),
            out=source.linear([f"{at}.out_proj"], [hidden], hidden, bias=True),
        )
        gate = PLAIN_GATES[config.activation_function]
        return Layer(
            mixer_norm=source.layer_norm(f"{prefix}.self_attn_layer_norm"),
            mixer=attention,
            mlp_norm=source.layer_norm(f"{prefix}.final_layer_norm"),
            mlp=source.plain_mlp(prefix, ("fc1", "fc2"), config.ffn_dim, gate, bias=True),
        )
