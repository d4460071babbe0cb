"""Logprobs: how likely the model itself held tokens, before temperature, filters, penalties and grammars."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Logprobs", "TorchLogprobs"]


class Logprobs(Protocol):
    """Of some rows of a step: of the likeliest tokens as they were before sampling changed logits, and of any
    others after it."""

    @property
    def top(self) -> torch.Tensor:
        """[N, top] float32, in order of likelihood."""

    @property
    def top_ids(self) -> torch.Tensor:
        """[N, top] int64, whose they are."""

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logprobs of one token per row, float32 [N]. Ids below 0 give that of token 0."""


class TorchLogprobs:
    """By torch's operations."""

    __slots__ = ("_all", "top", "top_ids")

    def __init__(self, logits: torch.Tensor, top: int) -> None:
        """``logits``: [N, V] float32, not kept. ``top``: likeliest tokens to report, 0 for none."""
        self._all = logits.log_softmax(dim=1)
        self.top, self.top_ids = self._all.topk(min(top, logits.shape[1]), dim=1)

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """See :class:`Logprobs`."""
        return self._all.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)
