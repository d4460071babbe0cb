"""Masks on logits: tokens that may not come next become impossible."""

from __future__ import annotations

import torch

__all__ = ["apply_masks_"]


def apply_masks_(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """Set the logits of tokens that a mask forbids to -inf, in place. NaN stays NaN where it is allowed.

    Args:
        logits: [S, V] float32.
        rows: [G] int64, the rows that have a mask.
        masks: [G, ceil(V / 32)] int32; bit ``token % 32`` of word ``token // 32`` allows a token.
    """
    vocab = logits.shape[1]
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = ((masks.unsqueeze(-1) >> bits) & 1).to(torch.bool).flatten(1)[:, :vocab]
    logits[rows] = logits[rows].masked_fill_(~allowed, float("-inf"))
