"""DiffusionGemma, its text model: Gemma 4 with experts, whose blocks are canvases.

An encoder and a decoder have the same weights but for the scale of each layer, and the decoder has
self-conditioning besides (:mod:`aioinfer.model.canvas`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from aioinfer.model.blocks import Blocks
from aioinfer.model.families.base import Source
from aioinfer.model.families.gemma4 import Gemma4
from aioinfer.model.gates import CONFIG_GATES
from aioinfer.model.layer import Layer, SelfConditioning
from aioinfer.model.norm import Norm

__all__ = ["DiffusionGemma"]

_CANVAS = Blocks(256, 0, canvas=True)


@dataclass(frozen=True, slots=True)
class DiffusionGemma(Gemma4):
    """DiffusionGemma. No own tensor is read twice: those that both passes have are the decoder's."""

    blocks: Blocks | None = _CANVAS

    def unsupported_reason(self, config: Any) -> str | None:
        if not config.tie_word_embeddings:
            return "weights of its own in the encoder"
        if getattr(config, "quantization_config", None) is not None:
            return "quantised weights"
        return Gemma4.unsupported_reason(self, config)

    def layer(self, source: Source, index: int) -> Layer:
        found = Gemma4.layer(self, source, index)
        encoder = source.weights.take(f"model.encoder.layers.{index}.layer_scalar", (1,))
        return replace(found, scale=encoder.item(), canvas_scale=found.scale)

    def canvas(self, source: Source) -> SelfConditioning:
        config, at = source.config, "model.self_conditioning"
        ones = torch.ones(config.hidden_size, dtype=torch.float32, device=source.device)
        return SelfConditioning(
            norm=source.norm(f"{at}.pre_norm", "exact"),
            mlp=source.gated_mlp(at, config.intermediate_size, CONFIG_GATES[config.hidden_activation]),
            post_norm=Norm(ones, config.rms_norm_eps),
        )
