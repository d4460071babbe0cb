"""Logprobs: log probabilities of the model, before temperature, filters, penalties and grammars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

__all__ = ["Logprobs", "TorchLogprobs", "score"]

#: rows whose logits and logprobs are there at a time, where only a few numbers of each row are kept
_PIECE = 256


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


def score(
    make: Callable[[torch.Tensor, int], Logprobs], logits: torch.Tensor, tokens: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The logprobs of one token per row, float32 [N], and the ids, int64 [N, top], and logprobs, float32
    [N, top], of the likeliest, a few rows at a time: a prompt has thousands.

    Args:
        make: makes the logprobs of rows [n, V] float32.
        logits: [N, V] of any floating type, N > 0.
        tokens: [N] int64.
        top: how many of the likeliest tokens.
    """
    pieces = []
    for rows, ids in zip(logits.split(_PIECE), tokens.split(_PIECE), strict=True):
        found = make(rows.float(), top)
        pieces.append((found.of(ids), found.top_ids, found.top))
    chosen, top_ids, values = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    return chosen, top_ids, values
