"""SmolVLM and Idefics3: a SigLIP over square tiles, whose patches are merged into one vector for several
(Marafioti et al., arXiv 2504.05299; Laurencon et al., arXiv 2408.12637)."""

from __future__ import annotations

from typing import Any

import torch

from aioinfer.model.linear import Linear, TorchLinear
from aioinfer.model.norm import Norm
from aioinfer.model.operations.torch_operations import normed
from aioinfer.model.vision.base import Encoder
from aioinfer.model.vision.siglip import siglip_blocks, siglip_unsupported
from aioinfer.model.vision.source import TowerSource, VisionFamily
from aioinfer.model.vision.tower import Pixels, Tower, TowerState, merged_patches, unfolded

__all__ = ["Smolvlm"]

#: fractions of a side are below 1 by this
_LESS = 1e-6


class Smolvlm(VisionFamily):
    """Encoders of SmolVLM, SmolVLM2 and Idefics3."""

    prefixes = ("vision_model.", "connector.")

    def unsupported_reason(self, config: Any) -> str | None:
        vision = config.vision_config
        side = vision.image_size // vision.patch_size
        if side % config.scale_factor:
            return f"{side} patches a side in its encoder, {config.scale_factor} of which are one"
        return siglip_unsupported(vision)

    def inner_sizes(self, config: Any) -> list[int]:
        vision = config.vision_config
        return [vision.hidden_size, vision.intermediate_size]

    def encoder(self, source: TowerSource) -> Encoder:
        return _SmolVLMTower(source)


class _SmolVLMTower(Tower):
    def __init__(self, source: TowerSource) -> None:
        config, vision, weights = source.config, source.config.vision_config, source.weights
        width, size = vision.hidden_size, vision.patch_size
        self._size, self._side, self._factor = size, vision.image_size // size, config.scale_factor
        embeddings = "vision_model.embeddings"
        shape = vision.num_channels, size, size
        self._patches: TorchLinear = source.patch_embedding(f"{embeddings}.patch_embedding", width, *shape)
        self._positions = weights.take(f"{embeddings}.position_embedding.weight", (self._side**2, width))
        blocks = siglip_blocks(source, "vision_model.encoder.layers", vision)
        self._norm: Norm = source.layer_norm("vision_model.post_layernorm", width, vision.layer_norm_eps)
        hidden, merged = config.text_config.hidden_size, width * self._factor**2
        projection = "connector.modality_projection.proj"
        self._projection: Linear = source.linear([projection], [hidden], merged, bias=False)
        super().__init__(blocks, source.support((self._side // self._factor) ** 2))

    def begin(self, pixels: Pixels) -> TowerState:
        """``pixels``: "pixel_values" float32 [channels, height, width], a square tile."""
        patches, grid = unfolded(pixels["pixel_values"], (self._size, self._size))
        table = self._positions
        hidden = self._patches(patches.to(table.device, table.dtype))
        return TowerState(hidden + table[self._places(grid).to(table.device)], grid)

    def end(self, state: TowerState) -> torch.Tensor:
        merged = merged_patches(normed(state.residual(), self._norm), state.grid, self._factor)
        return self._projection(merged)[None]

    def _places(self, grid: tuple[int, int]) -> torch.Tensor:
        """int64 [patches]: the rows of the table of positions, which is stretched over the tile: each patch
        has that of its corner, computed as transformers does, to the bit."""
        side = self._side
        bounds = torch.arange(1 / side, 1.0, 1 / side)
        places = []
        for count in grid:
            steps = torch.arange(count, dtype=torch.float32) * (1.0 / torch.tensor(count))
            places.append(torch.bucketize(steps.clamp(max=1.0 - _LESS), bounds, right=True))
        rows, columns = places
        return torch.add(rows[:, None] * side, columns).flatten()
