"""Gemma (arXiv 2403.08295), Gemma 2 (arXiv 2408.00118) and the text models of Gemma 3 (arXiv 2503.19786).

The vectors of tokens are scaled by the root of their size, norms store their weights less one, and the gate
is a GELU. Gemma 2 and 3 have a norm after each part of a layer, too, and windows in most layers; Gemma 2
caps scores and logits, Gemma 3 norms each head and has a rotation of its own for layers with a window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from aioinfer.model.attention.base import AttentionParams
from aioinfer.model.families.base import NormWeight, Source, head_dim, own
from aioinfer.model.families.llama import LayerNorms, LlamaLike
from aioinfer.model.layer import Embedding

__all__ = ["FOUR_NORMS", "Gemma"]

#: names in Gemma 2 and 3
FOUR_NORMS = LayerNorms(
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
)


@dataclass(frozen=True, slots=True)
class Gemma(LlamaLike):
    """Gemma, Gemma 2 and Gemma 3."""

    norm_weight: NormWeight = "offset"
    #: whether the config states a soft cap of scores; that of Gemma 3's config is not read
    capped: bool = False
    #: whether the tokens of an image see each other both ways
    spans: bool = False

    def unsupported_reason(self, config: Any) -> str | None:
        if getattr(config, "use_bidirectional_attention", None):
            return "bidirectional attention"
        # Not super(): a dataclass with slots is another class than the one that its methods close over.
        return LlamaLike.unsupported_reason(self, config)

    def embedding(self, source: Source) -> Embedding:
        scale = torch.tensor(source.config.hidden_size**0.5, dtype=source.weights.dtype)
        return Embedding(scale=scale.item())

    def logit_cap(self, config: Any) -> float | None:
        cap: float | None = own(config, "final_logit_softcapping")
        return cap

    def _attention_params(self, source: Source, index: int) -> AttentionParams:
        config = source.config
        return AttentionParams(
            scale=(own(config, "query_pre_attn_scalar") or head_dim(config)) ** -0.5,
            window=self._window(config, index),
            soft_cap=config.attn_logit_softcapping if self.capped else None,
            spans=self.spans,
        )

    def _activation(self, config: Any) -> str:
        name: str = getattr(config, "hidden_activation", None) or config.hidden_act
        return name
