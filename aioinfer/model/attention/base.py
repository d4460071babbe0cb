"""Attention: the interface between a model's layers and the kernels."""

from __future__ import annotations

from typing import Protocol

import torch

from aioinfer.model.batch import Batch

__all__ = ["Attention"]


class Attention(Protocol):
    """Causal attention of packed rows over paged KV.

    A row's result depends on its own sequence alone: whatever other requests left in the pool, NaN
    included, must not reach it.
    """

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        *,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Write all rows' keys and values, then let every token attend to its own sequence.

        Args:
            layer: index of the layer, which has its own KV.
            q: [T, num_heads, head_dim].
            k, v: [T, num_kv_heads, head_dim] of the same tokens.
            scale: factor of the dot products.
            window: the last so many positions only, its own included; None is all of them.

        Returns:
            [T, num_heads, head_dim]
        """
