"""Logprobs: how likely the model itself held tokens, before temperature, filters, penalties and grammars."""

from __future__ import annotations

import torch

__all__ = ["Logprobs"]


class Logprobs:
    """Of some rows of a step: kept as they were before sampling changed them, and looked up after it."""

    __slots__ = ("_all", "top", "top_ids")

    def __init__(self, logits: torch.Tensor, top: int) -> None:
        """``logits``: [N, V] float32, not kept. ``top``: likeliest tokens to report, 0 for none."""
        self._all = logits.log_softmax(dim=1)
        #: [N, top] float32 and int64, in order of likelihood
        self.top, self.top_ids = self._all.topk(min(top, logits.shape[1]), dim=1)

    def of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logprobs of one token per row, float32 [N]. Ids below 0 give that of token 0."""
        return self._all.gather(1, tokens.clamp(min=0).unsqueeze(1)).squeeze(1)
