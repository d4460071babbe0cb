"""GPT-2 (Radford et al., 2019): layer norms, learned positions, and a feed-forward part without gates.

Its matrices are stored transposed, and under names with or without a common prefix.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from aioinfer.errors import ConfigError
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.families.base import Family, Source, head_dim
from aioinfer.model.gates import CONFIG_GATES
from aioinfer.model.layer import Embedding, Layer
from aioinfer.model.mlp import FeedForward
from aioinfer.model.norm import Norm
from aioinfer.model.weights import StoredMatrix

__all__ = ["GPT2"]

_PREFIX = "transformer."


class GPT2(Family):
    """GPT-2."""

    def unsupported_reason(self, config: Any) -> str | None:
        if config.n_embd % config.n_head:
            raise ConfigError(f"model: n_embd, {config.n_embd}, is no multiple of n_head, {config.n_head}")
        if config.activation_function not in CONFIG_GATES:
            return f"the activation {config.activation_function}"
        return "attention to another model" if config.add_cross_attention else None

    def words(self, names: Container[str]) -> str:
        return f"{_prefix(names)}wte"

    def embedding(self, source: Source) -> Embedding:
        name, shape = (
            f"{_prefix(source.weights)}wpe.weight",
            (source.max_model_len, source.config.hidden_size),
        )
        return Embedding(positions=source.weights.take(name, shape))

    def final_norm(self, source: Source) -> Norm:
        return _norm(source, f"{_prefix(source.weights)}ln_f")

    def layer(self, source: Source, index: int) -> Layer:
        config, prefix = source.config, f"{_prefix(source.weights)}h.{index}"
        hidden = config.hidden_size
        attention = source.attention(
            index,
            qkv=source.kernels.linear(_matrix(source, f"{prefix}.attn.c_attn", 3 * hidden, hidden)),
            rope=None,
            params=AttentionParams(_scale(config, index), block=source.block),
            out=source.kernels.linear(_matrix(source, f"{prefix}.attn.c_proj", hidden, hidden)),
        )
        return Layer(
            mixer_norm=_norm(source, f"{prefix}.ln_1"),
            mixer=attention,
            mlp_norm=_norm(source, f"{prefix}.ln_2"),
            mlp=_mlp(source, f"{prefix}.mlp"),
        )


def _mlp(source: Source, prefix: str) -> FeedForward:
    config, hidden = source.config, source.config.hidden_size
    middle = 4 * hidden if config.n_inner is None else config.n_inner
    up = _matrix(source, f"{prefix}.c_fc", middle, hidden)
    down = _matrix(source, f"{prefix}.c_proj", hidden, middle)
    return source.kernels.plain_mlp(up, down, CONFIG_GATES[config.activation_function])


def _prefix(weights: Container[str]) -> str:
    """Prefix of all names: the checkpoints of the first release have none."""
    return _PREFIX if f"{_PREFIX}wte.weight" in weights else ""


def _norm(source: Source, name: str) -> Norm:
    size = (source.config.hidden_size,)
    weight, bias = (source.weights.take(f"{name}.{part}", size) for part in ("weight", "bias"))
    return Norm(weight, source.config.layer_norm_epsilon, bias)


def _matrix(source: Source, name: str, rows: int, width: int) -> StoredMatrix:
    return StoredMatrix(source.weights, [name], [rows], width, bias=True, transposed=True)


def _scale(config: Any, index: int) -> float:
    scale = head_dim(config) ** -0.5 if config.scale_attn_weights else 1.0
    return float(scale / (index + 1) if config.scale_attn_by_inverse_layer_idx else scale)
