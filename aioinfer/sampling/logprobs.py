"""Logprobs: log probabilities of the model, before temperature, filters, penalties and grammars."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Logprobs", "TorchLogprobs"]


class Logprobs(Protocol):
    """Logprobs of N rows of a step: of the likeliest tokens, and on request of given tokens, which may be
    known only after sampling."""

    @property
    def top(self) -> torch.Tensor:
        """[N, top] float32: logprobs of the likeliest tokens, in falling order."""

    @property
    def top_ids(self) -> torch.Tensor:
        """[N, top] int64: the ids of those tokens."""

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logprobs of one token per row, float32 [N]. Ids below 0 give that of token 0."""


class TorchLogprobs:
    """:class:`Logprobs` by torch's operations."""

    __slots__ = ("_all", "top", "top_ids")

    def __init__(self, logits: torch.Tensor, top: int) -> None:
        """``logits`` are [N, V] float32; the object keeps no reference. ``top`` is the number of likeliest
        tokens, 0 for none."""
        self._all = logits.log_softmax(dim=1)
        self.top, self.top_ids = self._all.topk(min(top, logits.shape[1]), dim=1)

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """See :class:`Logprobs`."""
        return self._all.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)
