"""Attention: the interface between a model's layers and the kernels."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from aioinfer.model.batch import Batch
from aioinfer.model.heads import HeadNorm
from aioinfer.model.rope import Rotary

__all__ = ["Attention", "AttentionParams", "LatentHeads"]


class AttentionParams(NamedTuple):
    """The constants of one layer's attention: which keys a query attends to, and how scores are computed.

    A tuple, because kernels use it as the key of their cached plans and a tuple is hashed quickly.
    """

    #: factor of the dot products
    scale: float
    #: length of a sliding window: the most positions, up to and including its own, that a query attends to;
    #: None for all. The rest of the query's block is visible beyond the window.
    window: int | None = None
    #: scores become ``soft_cap * tanh(score / soft_cap)`` (Gemma 2, arXiv 2408.00118)
    soft_cap: float | None = None
    #: length of a diffusion block in positions: a query attends to every position up to the end of its own
    #: block, as far as its row goes (block diffusion, arXiv 2503.09573). 1 is causal attention.
    block: int = 1
    #: whether keys and values are those that another layer of the same step has written: there are queries
    #: only, and nothing is written
    shared: bool = False
    #: whether the tokens of an image see each other both ways: a query attends to every position from its
    #: window's first up to ``ends`` of the :class:`~aioinfer.model.batch.Batch`, if that has any
    spans: bool = False


class LatentHeads(Protocol):
    """The heads of a layer that share one latent of a position, with [n, 1, width] in place of keys, whose
    first elements are in place of values; see :mod:`aioinfer.model.mixers.latent_attention`."""

    def absorbed(self, q: torch.Tensor) -> torch.Tensor:
        """Queries [T, num_heads, query_dim] in the space of latents, [T, num_heads, width]."""

    def results(self, mixed: torch.Tensor) -> torch.Tensor:
        """Weighted sums of values [T, num_heads, rank] as results of heads, [T, num_heads, value_dim]."""

    def expanded(self, latents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The heads' own keys [n, num_heads, query_dim] and values [n, num_heads, value_dim]."""

    def expands(self, tokens: int) -> bool:
        """Whether so many tokens of a row are computed faster over the heads' own keys and values."""


class Attention(Protocol):
    """Attention of packed rows over paged KV: writes the keys and values of all rows of the step, unless they
    are shared, then lets every token attend to its own sequence.

    A row's result depends on its own sequence alone: values of other requests in the pool, NaN included, do
    not affect it. Both calls return [T, num_heads, head_dim] in q's dtype; ``layer`` is the index of the KV
    that is written, or, if that is shared, read.
    """

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: Batch,
        params: AttentionParams,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention over heads that the model has normed and rotated itself; not of shared KV.

        Args:
            q: [T, num_heads, head_dim], rotated.
            k, v: [T, num_kv_heads, head_dim] of the same tokens.
            sinks: [num_heads] float32, of each head the score of one more position that every query attends
                to and that has no value: it takes a share of the weights (gpt-oss; Xiao et al., arXiv
                2309.17453); None for none.
        """

    def fused(
        self,
        layer: int,
        qkv: torch.Tensor,
        norm: HeadNorm | None,
        rotary: Rotary | None,
        batch: Batch,
        params: AttentionParams,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention from the fused projection, so that a kernel can norm, rotate and store in one launch.

        Rounds where :func:`~aioinfer.model.heads.split_heads` rounds.

        Args:
            qkv: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys and values as projected; with
                shared KV [T, num_heads, head_dim].
            norm: norm of each head's query and key, and value, applied before the rotation; None for none.
                One of all heads as one vector is the caller's.
            rotary: rotary factors at the tokens' positions; None: nothing is rotated.
            sinks: as above.
        """
