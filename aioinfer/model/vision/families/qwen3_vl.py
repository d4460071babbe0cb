"""Qwen3-VL and Qwen3.5: a ViT over images of any size, with positions twice and features at several depths
(Bai et al., arXiv 2511.21631).

A table of positions is stretched over the image, and queries and keys are rotated by rows and columns.
Squares of patches become a vector behind the last layer, and in Qwen3-VL behind others as well (DeepStack,
arXiv 2406.04334). The patches of a square are beside each other from the beginning.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isqrt
from typing import Any

import torch

from aioinfer.model.mlp import FeedForward
from aioinfer.model.norm import Norm
from aioinfer.model.operations.torch_operations import normed
from aioinfer.model.vision.base import Encoder
from aioinfer.model.vision.source import GELUS, TowerSource, VisionFamily
from aioinfer.model.vision.tower import Block, Pixels, Rotation, Tower, TowerState

__all__ = ["Qwen3Vl"]

_EPS = 1e-6
#: positions of the largest image that the image processors of the releases make
_LONGEST = 2**14


class Qwen3Vl(VisionFamily):
    """Encoders of Qwen3-VL and Qwen3.5, dense or with experts."""

    prefixes = ("visual.",)

    def unsupported_reason(self, config: Any) -> str | None:
        vision, text = config.vision_config, config.get_text_config()
        if vision.hidden_act not in GELUS:
            return f"the activation {vision.hidden_act} in its encoder"
        if vision.hidden_size % (4 * vision.num_heads):
            return f"{vision.num_heads} heads of {vision.hidden_size} dimensions in its encoder"
        if "mrope_section" not in (text.rope_parameters or {}):
            return "no mrope_section"
        behind = _deep(vision)
        if sorted({*behind} & {*range(vision.depth)}) != behind or len(behind) > text.num_hidden_layers:
            return f"features behind layers {behind} of its encoder"
        return None

    def inner_sizes(self, config: Any) -> list[int]:
        vision = config.vision_config
        merged = vision.hidden_size * vision.spatial_merge_size**2
        return [vision.hidden_size, vision.intermediate_size, merged]

    def encoder(self, source: TowerSource) -> Encoder:
        return _Qwen3VLTower(source)


def _deep(vision: Any) -> list[int]:
    """Layers behind which there are features, too."""
    return list(getattr(vision, "deepstack_visual_indexes", None) or ())


@dataclass(frozen=True, slots=True)
class _Merger:
    """From patches to vectors of the text model."""

    #: patches of a square
    square: int
    norm: Norm
    #: a square is normed as one vector
    whole: bool
    mlp: FeedForward

    @classmethod
    def of(cls, source: TowerSource, name: str, *, whole: bool) -> _Merger:
        vision = source.config.vision_config
        width, square = vision.hidden_size, vision.spatial_merge_size**2
        merged = width * square
        norm = source.layer_norm(f"{name}.norm", merged if whole else width, _EPS)
        names, sizes = (f"{name}.linear_fc1", f"{name}.linear_fc2"), (merged, merged, vision.out_hidden_size)
        return cls(square, norm, whole, source.mlp(names, sizes, "gelu"))

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        count = len(hidden) // self.square
        if self.whole:
            return self.mlp(normed(hidden.view(count, -1), self.norm))
        return self.mlp(normed(hidden, self.norm).view(count, -1))


class _Qwen3VLTower(Tower):
    def __init__(self, source: TowerSource) -> None:
        vision, weights = source.config.vision_config, source.weights
        width, size = vision.hidden_size, vision.patch_size
        self._square, self._side = vision.spatial_merge_size, isqrt(vision.num_position_embeddings)
        shape = vision.in_channels, vision.temporal_patch_size, size, size
        self._patches = source.patch_embedding("visual.patch_embed.proj", width, *shape)
        self._positions = weights.take("visual.pos_embed.weight", (vision.num_position_embeddings, width))
        blocks = [_block(source, f"visual.blocks.{index}") for index in range(vision.depth)]
        self._merger = _Merger.of(source, "visual.merger", whole=False)
        #: by layer
        self._deep: list[_Merger | None] = [None] * vision.depth
        for number, index in enumerate(_deep(vision)):
            self._deep[index] = _Merger.of(source, f"visual.deepstack_merger_list.{number}", whole=True)
        half = width // vision.num_heads // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        self._frequencies = 1.0 / vision.rope_parameters["rope_theta"] ** exponents
        longest = min(_LONGEST, source.config.get_text_config().max_position_embeddings)
        super().__init__(blocks, source.support(longest, deep=len(_deep(vision)), m_rope=True))

    def begin(self, pixels: Pixels) -> TowerState:
        """``pixels``: "pixel_values" float32 [patches, channels * times * size * size], the patches of a
        square beside each other; "grid": rows and columns of patches."""
        table = self._positions
        rows, columns = pixels["grid"].tolist()
        patches = torch.tensor(pixels["pixel_values"], dtype=table.dtype, device=table.device)
        places = self._places(rows, columns).to(table.device)
        hidden = self._patches(patches) + self._stretched(places, (rows, columns))
        return TowerState(hidden, (rows, columns), self._rotation(places))

    def layer(self, index: int, state: TowerState) -> TowerState:
        state = super().layer(index, state)
        merger = self._deep[index]
        if merger is None:
            return state
        hidden = state.residual()
        return replace(state, hidden=hidden, delta=None, deep=(*state.deep, merger(hidden)))

    def end(self, state: TowerState) -> torch.Tensor:
        return torch.stack((self._merger(state.residual()), *state.deep))

    def _places(self, rows: int, columns: int) -> torch.Tensor:
        """int64 [2, patches]: the row and the column of each patch."""
        size = self._square
        order = torch.arange(rows * columns).view(rows // size, size, columns // size, size)
        order = order.transpose(1, 2).flatten()
        return torch.stack((order // columns, order % columns))

    def _stretched(self, places: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
        """[patches, width]: the table of positions, its corners at those of the image, bilinear between."""
        last = self._side - 1
        below, share = [], []
        for place, count in zip(places, grid, strict=True):
            at = place.float() * last / max(count - 1, 1)
            below.append(at.floor().long())
            share.append(at - at.floor())
        hidden = torch.zeros((), device=places.device)
        for down in (0, 1):
            for right in (0, 1):
                row, column = (below[0] + down).clamp(max=last), (below[1] + right).clamp(max=last)
                weight = (share[0] if down else 1 - share[0]) * (share[1] if right else 1 - share[1])
                hidden = hidden + self._positions[row * self._side + column] * weight[:, None]
        return hidden.to(self._positions.dtype)

    def _rotation(self, places: torch.Tensor) -> Rotation:
        """Of the first half of the pairs of a head by its row, of the other by its column."""
        angles = places[..., None] * self._frequencies.to(places.device)
        angles = torch.cat((angles[0], angles[1]), dim=-1)[:, None]
        return angles.cos(), angles.sin()


def _block(source: TowerSource, name: str) -> Block:
    vision = source.config.vision_config
    width, middle, heads = vision.hidden_size, vision.intermediate_size, vision.num_heads
    qkv = source.linear([f"{name}.attn.qkv"], [3 * width], width, bias=True)
    out = source.linear([f"{name}.attn.proj"], [width], width, bias=True)
    names = f"{name}.mlp.linear_fc1", f"{name}.mlp.linear_fc2"
    return Block(
        source.kernels.operations,
        attention_norm=source.layer_norm(f"{name}.norm1", width, _EPS),
        attention=source.attention(qkv, out, heads, (width // heads) ** -0.5),
        mlp_norm=source.layer_norm(f"{name}.norm2", width, _EPS),
        mlp=source.mlp(names, (width, middle, width), vision.hidden_act),
    )
