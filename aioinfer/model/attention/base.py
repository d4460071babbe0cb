"""Attention: the interface between a model's layers and the kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm
from aioinfer.model.rope import Rotary

__all__ = ["Attention", "AttentionParams"]


class AttentionParams(NamedTuple):
    """What a layer's queries see and how they weigh it: constants of the layer.

    Kernels keep what they work out for a step by it, hence a tuple, which is hashed quickly.
    """

    #: factor of the dot products
    scale: float
    #: positions up to a query's own that it sees at most, None being all; the rest of its block comes on top
    window: int | None = None
    #: scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2, arXiv 2408.00118)
    soft_cap: float | None = None
    #: A query sees everything up to the end of its own block of so many positions, counted from the start
    #: of the sequence, as far as its row goes (block diffusion, arXiv 2503.09573); 1 is causal.
    block: int = 1


class Attention(Protocol):
    """Attention of packed rows over paged KV: keys and values of all rows of the step are written, then every
    token attends to its own sequence.

    A row's result depends on its own sequence alone: whatever other requests left in the pool, NaN
    included, must not reach it. Both calls return [T, num_heads, head_dim]; ``layer`` is the index of the
    layer, which has its own KV.
    """

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        """For models that prepare their heads themselves.

        Args:
            q: [T, num_heads, head_dim], rotated.
            k, v: [T, num_kv_heads, head_dim] of the same tokens.
        """

    def fused(
        self,
        layer: int,
        qkv: torch.Tensor,
        norm: HeadNorm | None,
        rotary: Rotary,
        batch: Batch,
        params: AttentionParams,
    ) -> torch.Tensor:
        """From the projection on, so that kernels can norm, rotate and store in one go.

        Rounded as :func:`~aioinfer.model.heads.split_heads` does it.

        Args:
            qkv: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys and values as projected.
            norm: of the queries and keys, before they are rotated.
            rotary: factors of the tokens' positions.
        """
