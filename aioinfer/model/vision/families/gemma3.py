"""Gemma 3: a SigLIP over squares, whose patches are averaged over squares of their own (arXiv 2503.19786)."""

from __future__ import annotations

from typing import Any

import torch

from aioinfer.model.operations.torch_operations import normed
from aioinfer.model.vision.base import Encoder
from aioinfer.model.vision.siglip import siglip_blocks, siglip_unsupported
from aioinfer.model.vision.source import TowerSource, VisionFamily
from aioinfer.model.vision.tower import Pixels, Tower, TowerState, averaged_patches, unfolded
from aioinfer.model.weights import StoredMatrix

__all__ = ["Gemma3"]

_PROJECTOR = "multi_modal_projector"
#: of the tensors that make one vector of an image, which Gemma does not
_POOLED = [
    "probe",
    *(f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")),
    *(f"{name}.{end}" for name in ("layernorm", "mlp.fc1", "mlp.fc2") for end in ("weight", "bias")),
]


class Gemma3(VisionFamily):
    """Encoders of Gemma 3."""

    prefixes = ("vision_tower.", f"{_PROJECTOR}.")
    renames = (
        ("vision_tower.vision_model.", "vision_tower."),
        (f"{_PROJECTOR}.mm_input_projection_weight", f"{_PROJECTOR}.mm_input_projection.weight"),
    )

    def unsupported_reason(self, config: Any) -> str | None:
        side, factor = _squares(config)
        if side % factor or (side // factor) ** 2 != config.mm_tokens_per_image:
            return f"{config.mm_tokens_per_image} positions of an image of {side} by {side} patches"
        return siglip_unsupported(config.vision_config)

    def two_way(self, config: Any) -> bool:
        return True

    def inner_sizes(self, config: Any) -> list[int]:
        vision = config.vision_config
        return [vision.hidden_size, vision.intermediate_size]

    def encoder(self, source: TowerSource) -> Encoder:
        return _Gemma3Tower(source)


def _squares(config: Any) -> tuple[int, int]:
    """Patches of a side of an image, and of a side of what one position has."""
    side = config.vision_config.image_size // config.vision_config.patch_size
    return side, max(1, side // max(1, int(config.mm_tokens_per_image**0.5)))


class _Gemma3Tower(Tower):
    def __init__(self, source: TowerSource) -> None:
        config, vision, weights = source.config, source.config.vision_config, source.weights
        width, hidden, size = vision.hidden_size, config.text_config.hidden_size, vision.patch_size
        self._size, (self._side, self._factor) = size, _squares(config)
        shape = vision.num_channels, size, size
        self._patches = source.patch_embedding("vision_tower.embeddings.patch_embedding", width, *shape)
        name = "vision_tower.embeddings.position_embedding.weight"
        self._positions = weights.take(name, (self._side**2, width))
        blocks = siglip_blocks(source, "vision_tower.encoder.layers", vision)
        self._norm = source.layer_norm("vision_tower.post_layernorm", width, vision.layer_norm_eps)
        for name in _POOLED:
            weights.leave(f"vision_tower.head.{name}")
        self._projector_norm = source.rms_norm(
            f"{_PROJECTOR}.mm_soft_emb_norm", width, vision.layer_norm_eps, "offset"
        )
        projection = [f"{_PROJECTOR}.mm_input_projection"], [hidden], width
        self._projection = source.kernels.linear(
            StoredMatrix(weights, *projection, bias=False, transposed=True)
        )
        token = config.image_token_index
        # The image token may be none of the vocabulary.
        filler = None if token < config.text_config.vocab_size else 0
        support = source.support(config.mm_tokens_per_image, token_id=token, filler_id=filler, two_way=True)
        super().__init__(blocks, support)

    def begin(self, pixels: Pixels) -> TowerState:
        """``pixels``: "pixel_values" float32 [channels, height, width], a square."""
        patches, grid = unfolded(pixels["pixel_values"], (self._size, self._size))
        if grid != (self._side, self._side):
            raise ValueError(f"images have {self._side} x {self._side} patches, not {grid}")
        table = self._positions
        return TowerState(self._patches(patches.to(table.device, table.dtype)) + table, grid)

    def end(self, state: TowerState) -> torch.Tensor:
        averaged = averaged_patches(normed(state.residual(), self._norm), state.grid, self._factor)
        return self._projection(normed(averaged, self._projector_norm))[None]
