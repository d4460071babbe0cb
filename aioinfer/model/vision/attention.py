"""Attention of image encoders: all patches of a unit see each other."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

__all__ = ["TwoWayAttention", "torch_attention"]


class TwoWayAttention(Protocol):
    """Attention of one unit, which is alone: its bits depend on nothing else."""

    def __call__(self, qkv: torch.Tensor, scale: float) -> torch.Tensor:
        """[patches, heads, head_dim] of [patches, 3 * heads, head_dim]: queries, keys and values; ``scale``:
        of the dot products."""


def torch_attention(qkv: torch.Tensor, scale: float) -> torch.Tensor:
    """A :class:`TwoWayAttention` by torch, on any device."""
    query, key, value = (part.transpose(0, 1)[None] for part in qkv.chunk(3, dim=1))
    return F.scaled_dot_product_attention(query, key, value, scale=scale)[0].transpose(0, 1)
