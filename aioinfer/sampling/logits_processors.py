"""Logits processors: bias, ban or mask single tokens before sampling.

:mod:`aioinfer.sampling.triton_logits` and :mod:`aioinfer.sampling.native_sampler` implement the same three
functions as kernels.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["LogitsProcessors", "add_biases_", "apply_masks_", "ban_"]


class LogitsProcessors(Protocol):
    """The interface of this module's functions, for any backend."""

    def add_biases_(
        self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, bits: torch.Tensor
    ) -> None:
        """See :func:`add_biases_`."""

    def ban_(self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
        """See :func:`ban_`."""

    def apply_masks_(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """See :func:`apply_masks_`."""


def add_biases_(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, bits: torch.Tensor) -> None:
    """Add to single logits, in place.

    Args:
        logits: [S, V] float32.
        rows, ids: [B] int64, the logits to change; no pair twice.
        bits: [B] int64, the summands, each the bits of a float32.
    """
    logits.index_put_((rows, ids), bits.to(torch.int32).view(torch.float32), accumulate=True)


def ban_(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """Set single logits to -inf, in place. NaN remains and +inf becomes NaN, so that the sampler still
    detects a broken row.

    Args:
        logits: [S, V] float32.
        rows, ids: [K] int64, the logits to ban; pairs may occur more than once.
    """
    never = logits.new_full((), float("-inf")).expand_as(ids)
    logits.index_put_((rows, ids), never, accumulate=True)


def apply_masks_(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set the logits of tokens that a mask forbids to -inf, in place. NaN stays NaN where it is allowed.

    Args:
        logits: [S, V] float32.
        rows: [G] int64, the rows that have a mask.
        masks: [G, words] int32; bit ``token % 32`` of word ``token // 32`` allows a token. Tokens beyond
            the last word are forbidden.
    """
    vocab = logits.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((masks.unsqueeze(-1) >> bits) & 1).to(torch.bool).flatten(1)[:, :vocab]
    if allowed.shape[1] < vocab:
        allowed = torch.nn.functional.pad(allowed, (0, vocab - allowed.shape[1]))
    logits[rows] = logits[rows].masked_fill_(~allowed, float("-inf"))
