"""EAGLE-3: one layer over the hidden states of three layers (Li et al., arXiv 2503.01840).

A product makes them one vector, which is the residual. The layer's attention reads the norm of a token's
vector and that of the residual, side by side. The head's logits are of fewer tokens than the model's as a
rule: ``d2t`` has the differences of ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.draft_heads.base import DraftHead, Target
from aioinfer.model.families.base import Source, head_dim, kv_heads
from aioinfer.model.gates import CONFIG_GATES
from aioinfer.model.layer import Layer
from aioinfer.model.layer_kernels import LayerKernels
from aioinfer.model.norm import Norm
from aioinfer.model.rope import longest
from aioinfer.model.weights import RandomWeights, Weights

__all__ = ["Eagle3Head", "eagle3_places"]

_AT = "midlayer"


def eagle3_places(stated: Mapping[str, Any], num_layers: int) -> list[int]:
    """Places of the hidden states that a head with this config.json reads of a model of so many layers.
    ``eagle_config`` names layers whose outputs they are, as EAGLE's trainers do; the field of the same name
    beside it, layers whose inputs they are, as vLLM does. Raises ConfigError."""
    inner = stated.get("eagle_config")
    named = inner.get("eagle_aux_hidden_state_layer_ids") if isinstance(inner, dict) else None
    behind = named is not None
    if named is None:
        named = stated.get("eagle_aux_hidden_state_layer_ids")
    if named is None:
        named = [2, num_layers // 2, num_layers - 3]
    if not isinstance(named, list) or not named or not all(type(each) is int for each in named):
        raise ConfigError("eagle_aux_hidden_state_layer_ids are no numbers of layers")
    places = [each + behind for each in named]
    if not all(0 <= place <= num_layers for place in places):
        raise ConfigError(f"it reads layers {named}, and the model has {num_layers}")
    return places


class Eagle3Head(DraftHead):
    """See the module."""

    kind = "EAGLE-3"

    def __init__(
        self,
        target: Target,
        config: Any,
        stated: Mapping[str, Any],
        weights: Weights,
        kernels: LayerKernels,
        device: torch.device,
    ) -> None:
        """``config``: of a Llama with the head's layer; ``stated``: its config.json. Raises ConfigError."""
        spec = target.spec
        # Heads state the length that they were trained with, and have entries of all positions.
        positions = max(longest(config), spec.max_model_len)
        places, hidden = eagle3_places(stated, spec.num_layers), spec.hidden_size
        source = Source(config, weights, kernels, 1, device, positions)
        self._fc = source.linear(["fc"], [hidden], len(places) * hidden, bias=False)
        layer, norm = _layer(source), source.norm("norm")
        #: of the vectors, where the residual is the normed one
        self._vector_norm: Norm | None = None
        if stated.get("norm_before_residual"):
            self._vector_norm, layer.mixer_norm = layer.mixer_norm, None
        size = stated.get("draft_vocab_size") or spec.vocab_size
        self._head = source.linear(["lm_head"], [size], hidden, bias=False)
        self._ids = _target_ids(weights, size, spec.vocab_size)
        weights.check_all_taken(("t2d", "embed_tokens.weight", "rotary_emb.inv_freq"))
        super().__init__(target, [layer], norm, kernels.operations, places, positions)

    def features(self, captured: torch.Tensor) -> torch.Tensor:
        return self._fc(captured)

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        logits = self._head(normed)
        if self._ids is None:
            return logits
        every = logits.new_full((len(logits), self.target.spec.vocab_size), float("-inf"))
        every[:, self._ids] = logits
        return every

    def _residual(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        return self._normed(features, self._vector_norm)

    def _next_features(self, hidden: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        return hidden


def _layer(source: Source) -> Layer:
    config, at, size = source.config, f"{_AT}.self_attn", head_dim(source.config)
    hidden, q_rows, kv_rows = (
        config.hidden_size,
        config.num_attention_heads * size,
        kv_heads(config) * size,
    )
    names, bias = [f"{at}.{name}_proj" for name in "qkv"], bool(config.attention_bias)
    attention = source.attention(
        0,
        qkv=source.linear(names, [q_rows, kv_rows, kv_rows], 2 * hidden, bias=bias),
        rope=source.rope(0),
        params=AttentionParams(size**-0.5),
        out=source.linear([f"{at}.o_proj"], [hidden], q_rows, bias=bias),
    )
    gate = CONFIG_GATES[config.hidden_act]
    return Layer(
        mixer_norm=source.norm(f"{_AT}.hidden_norm"),
        word_norm=source.norm(f"{_AT}.input_layernorm"),
        mixer=attention,
        mlp_norm=source.norm(f"{_AT}.post_attention_layernorm"),
        mlp=source.gated_mlp(f"{_AT}.mlp", config.intermediate_size, gate, bias=bool(config.mlp_bias)),
    )


def _target_ids(weights: Weights, size: int, vocab_size: int) -> torch.Tensor | None:
    """Ids of the tokens of the head in the model, [size]; None: all, in their order. Raises ConfigError."""
    if isinstance(weights, RandomWeights):
        return None if size == vocab_size else torch.arange(size)
    if "d2t" not in weights.names:
        if size != vocab_size:
            raise ConfigError(f"it drafts {size} of {vocab_size} tokens, and has no d2t")
        return None
    ids = weights.take("d2t", (size,), dtype=torch.int64) + torch.arange(size)
    if not bool(((ids >= 0) & (ids < vocab_size)).all()) or len(ids.unique()) != size:
        raise ConfigError(f"d2t does not name {size} tokens of the model's {vocab_size}")
    return ids
