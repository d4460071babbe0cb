"""Tower: the skeleton of image encoders, a ViT (Dosovitskiy et al., arXiv 2010.11929) over one unit.

Families put it together of :class:`Block`, and add what is in front of the blocks and behind them. The
products, norms and attention of blocks are native where those of the text model are; everything else is
torch, in the model's dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.images.support import ImageSupport
from aioinfer.model.mlp import FeedForward
from aioinfer.model.norm import Norm
from aioinfer.model.operations.base import Operations
from aioinfer.model.operations.torch_operations import normed
from aioinfer.model.vision.attention import TwoWayAttention

__all__ = [
    *("Block", "Pixels", "Product", "Rotation", "Tower", "TowerAttention", "TowerState"),
    *("averaged_patches", "merged_patches", "rotated", "unfolded"),
]

#: the arrays of a unit, by their names
Pixels = Mapping[str, npt.NDArray[np.generic]]
#: a linear layer, clipped or not
Product = Callable[[torch.Tensor], torch.Tensor]
#: cos and sin, [patches, groups, n] each: each group of ``2 * n`` dimensions of a head is rotated by itself,
#: element i of its first half with element i of the second
Rotation = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class TowerState:
    """A unit between two layers."""

    #: [patches, width]
    hidden: torch.Tensor
    #: rows and columns of patches
    grid: tuple[int, int]
    #: of queries and keys; None: positions were added in front
    rotation: Rotation | None = None
    #: [length, hidden] each: features that are added behind layers of the text model
    deep: tuple[torch.Tensor, ...] = ()
    #: [patches, width]: what the last layer adds to ``hidden``; None: nothing
    delta: torch.Tensor | None = None

    def residual(self) -> torch.Tensor:
        """[patches, width], the sum."""
        return self.hidden if self.delta is None else self.hidden + self.delta


@dataclass(frozen=True, slots=True)
class TowerAttention:
    """Self-attention of all patches."""

    #: to [patches, 3 * heads * head_dim]: queries, keys and values
    qkv: Product
    out: Product
    heads: int
    scale: float
    attend: TwoWayAttention
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    value_norm: Norm | None = None
    #: norms are over all heads as one vector, not over each
    whole: bool = False

    def __call__(self, hidden: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """Normed [patches, width] to the summand of the residual."""
        count, qkv = len(hidden), self.qkv(hidden)
        norms = self.query_norm, self.key_norm, self.value_norm
        if rotation is not None or norms != (None, None, None):
            qkv = self._prepared(qkv, norms, rotation)
        seen = self.attend(qkv.view(count, 3 * self.heads, -1), self.scale)
        return self.out(seen.reshape(count, -1))

    def _prepared(
        self, qkv: torch.Tensor, norms: Sequence[Norm | None], rotation: Rotation | None
    ) -> torch.Tensor:
        """The projection with its heads normed and rotated."""
        parts = []
        for part, norm in zip(qkv.chunk(3, dim=-1), norms, strict=True):
            if norm is not None and self.whole:
                part = normed(part, norm)
            part = part.view(len(qkv), self.heads, -1)
            parts.append(part if norm is None or self.whole else normed(part, norm))
        if rotation is not None:
            parts[:2] = [rotated(part, rotation) for part in parts[:2]]
        return torch.cat(parts, dim=1)


@dataclass(frozen=True, slots=True)
class Block:
    """A layer: attention and a feed-forward part, each behind a norm."""

    operations: Operations
    attention_norm: Norm
    attention: TowerAttention
    mlp_norm: Norm
    mlp: FeedForward
    #: norms of the outputs of both parts
    attention_post_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    #: factors of the outputs of both parts, [width] (Touvron et al., arXiv 2103.17239)
    attention_scale: torch.Tensor | None = None
    mlp_scale: torch.Tensor | None = None

    def __call__(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual, [patches, width], and what the layer adds to it; ``delta``: of the last one."""
        hidden, values = self.operations.add_norm(hidden, delta, self.attention_norm)
        found = self.attention(values, rotation)
        found = self._found(found, self.attention_post_norm, self.attention_scale)
        hidden, values = self.operations.add_norm(hidden, found, self.mlp_norm)
        return hidden, self._found(self.mlp(values), self.mlp_post_norm, self.mlp_scale)

    def _found(self, part: torch.Tensor, norm: Norm | None, scale: torch.Tensor | None) -> torch.Tensor:
        part = part if norm is None else self.operations.add_norm(part, None, norm)[1]
        return part if scale is None else part * scale


class Tower(ABC):
    """An :class:`~aioinfer.model.vision.base.Encoder` of blocks. Each family has a subclass."""

    def __init__(self, blocks: Sequence[Block], support: ImageSupport) -> None:
        self.blocks = blocks
        self.depth = len(blocks)
        self.support = support

    @abstractmethod
    def begin(self, pixels: Pixels) -> TowerState:
        """The patches in front of the first block, from the arrays of a unit."""

    def layer(self, index: int, state: TowerState) -> TowerState:
        """The state behind a block."""
        hidden, delta = self.blocks[index](state.hidden, state.delta, state.rotation)
        return replace(state, hidden=hidden, delta=delta)

    @abstractmethod
    def end(self, state: TowerState) -> torch.Tensor:
        """The features; see :meth:`aioinfer.model.vision.base.Encoder.end`."""


def unfolded(pixels: npt.NDArray[Any], size: tuple[int, int]) -> tuple[torch.Tensor, tuple[int, int]]:
    """The patches of pixels [channels, height, width] as rows [patches, channels * size[0] * size[1]], on the
    CPU, and the grid of patches. Pixels that fill no patch are left out."""
    channels, height, width = pixels.shape
    rows, columns = height // size[0], width // size[1]
    cut = pixels[:, : rows * size[0], : columns * size[1]]
    patches = cut.reshape(channels, rows, size[0], columns, size[1]).transpose(1, 3, 0, 2, 4)
    # A copy, since the array may be for reading only.
    return torch.from_numpy(patches.copy()).view(rows * columns, -1), (rows, columns)


def merged_patches(hidden: torch.Tensor, grid: tuple[int, int], factor: int) -> torch.Tensor:
    """Squares of ``factor`` by ``factor`` patches as one vector each, [patches / factor**2, factor**2 *
    width]: row by row, as is a square inside (pixel shuffle; Shi et al., arXiv 1609.05158)."""
    rows, columns = grid[0] // factor, grid[1] // factor
    parts = hidden.view(rows, factor, columns, factor, -1).permute(0, 2, 1, 3, 4)
    return parts.reshape(rows * columns, -1)


def averaged_patches(hidden: torch.Tensor, grid: tuple[int, int], factor: int) -> torch.Tensor:
    """The averages of squares of ``factor`` by ``factor`` patches, [patches / factor**2, width], row by
    row."""
    rows, columns = grid[0] // factor, grid[1] // factor
    parts = hidden.view(rows, factor, columns, factor, -1).float()
    return parts.mean((1, 3)).flatten(0, 1).to(hidden.dtype)


def rotated(values: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Heads [patches, heads, head_dim], rotated; in the type of the factors, if that is the larger one."""
    cos, sin = (part[:, None] for part in rotation)
    first, second = values.unflatten(-1, (cos.shape[-2], 2, -1)).unbind(-2)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-2)
    return turned.flatten(-3).to(values.dtype)
