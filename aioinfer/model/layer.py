"""Layer and Trunk: the parts of a decoder between the vectors of tokens and the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from aioinfer.model.mixers.base import Mixer
from aioinfer.model.mlp import FeedForward
from aioinfer.model.norm import Norm
from aioinfer.model.per_layer import PerLayerInputs, PerLayerPart

__all__ = ["Embedding", "Layer", "SelfConditioning", "Trunk"]


@dataclass(slots=True, kw_only=True)
class Layer:
    """The weights and constants of one layer.

    A part without a norm in front of it reads the residual itself; the norm after a part is that of its
    output, before it is added to the residual.
    """

    mixer_norm: Norm | None
    #: of a token's own vector, which the mixer reads in front of the normed residual (EAGLE-3)
    word_norm: Norm | None = None
    mixer: Mixer
    mixer_post_norm: Norm | None = None
    mlp_norm: Norm | None
    #: None in a layer without (Nemotron-H)
    mlp: FeedForward | None
    mlp_post_norm: Norm | None = None
    per_layer: PerLayerPart | None = None
    #: whether both parts read the residual in front of the layer (GPT-J, PaLM: arXiv 2204.02311)
    parallel: bool = False
    #: factor of what each part adds to the residual (Granite)
    part_scale: float = 1.0
    #: factor of the residual after all parts
    scale: float = 1.0
    #: that of tokens of a canvas, where they have one of their own
    canvas_scale: float | None = None


@dataclass(frozen=True, slots=True)
class Embedding:
    """Operations on the vectors of tokens before the first layer."""

    #: their factor, as the model's dtype has it (Gemma)
    scale: float = 1.0
    #: [max_model_len, hidden], added by position (GPT-2); None for none
    positions: torch.Tensor | None = None
    #: vectors by token that layers add to the residual; None for none
    per_layer: PerLayerInputs | None = None


@dataclass(frozen=True, slots=True)
class SelfConditioning:
    """The input of a canvas besides its tokens: the last round's distribution of each position, as a vector
    (Chen et al., arXiv 2208.04202)."""

    norm: Norm
    mlp: FeedForward
    #: of the sum with the vectors of tokens
    post_norm: Norm


@dataclass(frozen=True, slots=True)
class Trunk:
    """A decoder without the vectors of tokens and the head."""

    embedding: Embedding
    layers: Sequence[Layer]
    #: the norm in front of the head
    norm: Norm
    #: logits become ``logit_cap * tanh(logit / logit_cap)``, behind their factor; None for none
    logit_cap: float | None
    #: None in a model without canvases
    conditioning: SelfConditioning | None = None
    #: factor of logits
    logit_scale: float = 1.0
