"""InternVL: InternViT over square tiles, with a token for the whole tile that is left out behind it (Chen et
al., arXiv 2312.14238)."""

from __future__ import annotations

from typing import Any

import torch

from aioinfer.model.norm import Norm
from aioinfer.model.operations.torch_operations import normed
from aioinfer.model.vision.base import Encoder
from aioinfer.model.vision.source import GELUS, TowerSource, VisionFamily
from aioinfer.model.vision.tower import (
    Block,
    Pixels,
    Tower,
    TowerState,
    merged_patches,
    unfolded,
)

__all__ = ["Internvl"]

#: of the norms of queries and keys, and of the projector's
_RMS_EPS, _LAYER_EPS = 1e-6, 1e-5


class Internvl(VisionFamily):
    """Encoders of InternVL3 and InternVL3.5, as transformers has them."""

    prefixes = ("vision_tower.", "multi_modal_projector.")

    def unsupported_reason(self, config: Any) -> str | None:
        vision, ratio = config.vision_config, config.downsample_ratio
        height, width = _grid(vision)
        if config.vision_feature_layer != -1 or config.vision_feature_select_strategy != "default":
            return "features of other layers of its encoder than the last"
        if not {vision.hidden_act, config.projector_hidden_act} <= GELUS.keys():
            return f"the activation {vision.hidden_act} or {config.projector_hidden_act} in its encoder"
        if height != width or height % _factor(config) or 1 / ratio != _factor(config):
            return f"tiles of {height} by {width} patches, of which {1 / ratio} a side are one"
        return None

    def inner_sizes(self, config: Any) -> list[int]:
        vision = config.vision_config
        return [vision.hidden_size, vision.intermediate_size, config.text_config.hidden_size]

    def encoder(self, source: TowerSource) -> Encoder:
        return _InternVLTower(source)


def _grid(vision: Any) -> tuple[int, int]:
    """Rows and columns of the patches of a tile."""
    height, width = (size // patch for size, patch in zip(vision.image_size, vision.patch_size, strict=True))
    return height, width


def _factor(config: Any) -> int:
    """Rows and columns of the patches that become one position."""
    return int(1 / config.downsample_ratio)


class _InternVLTower(Tower):
    def __init__(self, source: TowerSource) -> None:
        config, vision, weights = source.config, source.config.vision_config, source.weights
        width, self._factor = vision.hidden_size, _factor(config)
        self._size, self._grid = tuple(vision.patch_size), _grid(vision)
        count, name = self._grid[0] * self._grid[1], "vision_tower.embeddings"
        weights.leave(f"{name}.mask_token")
        shape = vision.num_channels, *self._size
        self._patches = source.patch_embedding(f"{name}.patch_embeddings.projection", width, *shape)
        self._first = weights.take(f"{name}.cls_token", (1, 1, width))[0]
        self._positions = None
        if vision.use_absolute_position_embeddings:
            self._positions = weights.take(f"{name}.position_embeddings", (1, count + 1, width))[0]
        blocks = [_block(source, index) for index in range(vision.num_hidden_layers)]
        self._norm: Norm | None = None
        if not vision.use_mean_pooling:
            self._norm = source.layer_norm("vision_tower.layernorm", width, vision.layer_norm_eps)
        merged, hidden = width * self._factor**2, config.text_config.hidden_size
        projector = "multi_modal_projector"
        self._projector_norm = source.layer_norm(f"{projector}.layer_norm", merged, _LAYER_EPS)
        both = f"{projector}.linear_1", f"{projector}.linear_2"
        self._projector = source.mlp(both, (merged, hidden, hidden), config.projector_hidden_act)
        super().__init__(blocks, source.support(count // self._factor**2))

    def begin(self, pixels: Pixels) -> TowerState:
        """``pixels``: "pixel_values" float32 [channels, height, width], a tile."""
        patches, grid = unfolded(pixels["pixel_values"], self._size)
        if grid != self._grid:
            raise ValueError(f"tiles have {self._grid} patches, not {grid}")
        first = self._first
        hidden = torch.cat([first, self._patches(patches.to(first.device, first.dtype))])
        return TowerState(hidden if self._positions is None else hidden + self._positions, grid)

    def end(self, state: TowerState) -> torch.Tensor:
        hidden = state.residual()
        hidden = hidden if self._norm is None else normed(hidden, self._norm)
        merged = merged_patches(hidden[1:], state.grid, self._factor)
        return self._projector(normed(merged, self._projector_norm))[None]


def _block(source: TowerSource, index: int) -> Block:
    vision, weights, name = source.config.vision_config, source.weights, f"vision_tower.encoder.layer.{index}"
    width, middle, heads = vision.hidden_size, vision.intermediate_size, vision.num_attention_heads
    attention, both = f"{name}.attention", (f"{name}.mlp.fc1", f"{name}.mlp.fc2")
    make_norm = source.layer_norm if vision.norm_type == "layer_norm" else source.rms_norm
    norms: list[Norm | None] = [None, None]
    if vision.use_qk_norm:
        norms = [source.rms_norm(f"{attention}.{part}_norm", width, _RMS_EPS) for part in "qk"]
    names = [f"{attention}.{part}_proj" for part in "qkv"]
    return Block(
        source.kernels.operations,
        attention_norm=make_norm(f"{name}.layernorm_before", width, vision.layer_norm_eps),
        attention=source.attention(
            qkv=source.linear(names, [width] * 3, width, bias=vision.attention_bias),
            out=source.linear([f"{attention}.projection_layer"], [width], width, bias=True),
            heads=heads,
            scale=(width // heads) ** -0.5,
            query_norm=norms[0],
            key_norm=norms[1],
            whole=True,
        ),
        mlp_norm=make_norm(f"{name}.layernorm_after", width, vision.layer_norm_eps),
        mlp=source.mlp(both, (width, middle, width), vision.hidden_act),
        attention_scale=weights.take(f"{name}.lambda_1", (width,)),
        mlp_scale=weights.take(f"{name}.lambda_2", (width,)),
    )
