"""LFM2-VL: a SigLIP 2 over images of any grid of patches (Tschannen et al., arXiv 2502.14786), whose patches
are merged into one vector for several and projected (arXiv 2511.23404)."""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F

from aioinfer.model.linear import TorchLinear
from aioinfer.model.operations.torch_operations import normed
from aioinfer.model.vision.base import Encoder
from aioinfer.model.vision.siglip import siglip_blocks, siglip_unsupported
from aioinfer.model.vision.source import GELUS, TowerSource, VisionFamily
from aioinfer.model.vision.tower import Pixels, Tower, TowerState, merged_patches

__all__ = ["Lfm2Vl"]

#: positions of an image in the processor's defaults, which the config does not state
_LONGEST = 256


class Lfm2Vl(VisionFamily):
    """Encoders of LFM2-VL and LFM2.5-VL."""

    #: Some checkpoints have a head, which pools what this model does not take.
    prefixes = (
        *(f"vision_tower.{part}." for part in ("embeddings", "encoder", "post_layernorm")),
        "multi_modal_projector.",
    )
    renames = (("vision_tower.vision_model.", "vision_tower."),)

    def unsupported_reason(self, config: Any) -> str | None:
        vision, activation = config.vision_config, config.projector_hidden_act
        if vision.model_type != "siglip2_vision_model":
            return f"an encoder of the type {vision.model_type}"
        if activation not in GELUS:
            return f"the activation {activation} in its projector"
        if isqrt(vision.num_patches) ** 2 != vision.num_patches:
            return f"{vision.num_patches} patches in its encoder, which are no square"
        return siglip_unsupported(vision)

    def inner_sizes(self, config: Any) -> list[int]:
        vision = config.vision_config
        merged = vision.hidden_size * config.downsample_factor**2
        return [vision.hidden_size, vision.intermediate_size, merged, config.projector_hidden_size]

    def encoder(self, source: TowerSource) -> Encoder:
        return _Lfm2VlTower(source)


class _Lfm2VlTower(Tower):
    def __init__(self, source: TowerSource) -> None:
        config, vision, weights = source.config, source.config.vision_config, source.weights
        width, self._factor = vision.hidden_size, config.downsample_factor
        embeddings = "vision_tower.embeddings"
        inner = vision.num_channels * vision.patch_size**2
        self._patches: TorchLinear = source.patch_embedding(f"{embeddings}.patch_embedding", width, inner)
        side, table = isqrt(vision.num_patches), f"{embeddings}.position_embedding.weight"
        # In float32, in which it is stretched.
        positions = weights.take(table, (side**2, width), dtype=torch.float32)
        self._positions = positions.view(1, side, side, width).permute(0, 3, 1, 2)
        self._dtype = weights.dtype
        blocks = siglip_blocks(source, "vision_tower.encoder.layers", vision)
        self._norm = source.layer_norm("vision_tower.post_layernorm", width, vision.layer_norm_eps)
        merged, projector = width * self._factor**2, "multi_modal_projector"
        self._merged_norm = None
        if config.projector_use_layernorm:
            self._merged_norm = source.layer_norm(f"{projector}.layer_norm", merged, 1e-5)
        self._projector = source.mlp(
            (f"{projector}.linear_1", f"{projector}.linear_2"),
            (merged, config.projector_hidden_size, config.text_config.hidden_size),
            config.projector_hidden_act,
            bias=config.projector_bias,
        )
        super().__init__(blocks, source.support(_LONGEST))

    def begin(self, pixels: Pixels) -> TowerState:
        """``pixels``: "pixel_values" float32 [patches, patch * patch * channels], and "spatial_shape": rows
        and columns of patches."""
        rows, columns = map(int, pixels["spatial_shape"])
        table = self._positions
        patches = torch.from_numpy(pixels["pixel_values"].copy())
        hidden = self._patches(patches.to(table.device, self._dtype))
        stretched = F.interpolate(
            table, (rows, columns), mode="bilinear", align_corners=False, antialias=True
        )
        return TowerState(hidden + stretched[0].flatten(1).T.to(self._dtype), (rows, columns))

    def end(self, state: TowerState) -> torch.Tensor:
        merged = merged_patches(normed(state.residual(), self._norm), state.grid, self._factor)
        if self._merged_norm is not None:
            merged = normed(merged, self._merged_norm)
        return self._projector(merged)[None]
