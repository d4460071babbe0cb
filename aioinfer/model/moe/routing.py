"""Routing: the experts of each token, and their weights.

All shapes follow from the number of tokens alone, so that nothing is read back from the device and a step can
be captured. Among experts of exactly equal score ``torch.topk`` chooses. A token with NaN, which padding may
have, is routed to arbitrary experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

__all__ = ["GroupedSigmoidRouter", "Router", "Rule", "SoftmaxRouter"]


class Router(Protocol):
    """Routes every token to ``top_k`` different experts."""

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] to the weights [T, top_k], a floating dtype, and the experts [T, top_k], int64."""


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """The most probable experts under a softmax over all experts (Qwen3-MoE; Switch Transformer, arXiv
    2101.03961, with more than one)."""

    #: [num_experts, hidden], in the dtype in which scores are computed
    weight: torch.Tensor
    top_k: int
    #: whether the chosen weights are scaled to a sum of 1: the same as a softmax over the chosen (gpt-oss)
    normalize: bool
    #: [num_experts], added to the scores before the softmax, or None
    bias: torch.Tensor | None = None
    #: [num_experts] float32, factors of the weights of the chosen experts, or None (Gemma 4)
    scales: torch.Tensor | None = None
    #: [num_experts] float32, added to the shares for the choice, which is float32 then, or None (ERNIE 4.5)
    balance: torch.Tensor | None = None

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights are rounded to the dtype of ``hidden``, as in transformers, or float32 with scales."""
        scores = F.linear(hidden.to(self.weight.dtype), self.weight, self.bias)
        shares = scores.softmax(-1, dtype=torch.float32)
        wanted = shares if self.balance is None else shares + self.balance
        experts = wanted.topk(self.top_k, dim=-1).indices
        weights = shares.gather(1, experts)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.scales is not None:
            return weights * self.scales[experts], experts
        return weights.to(hidden.dtype), experts


@dataclass(frozen=True, slots=True)
class GroupedSigmoidRouter:
    """The best experts of the best groups of experts (DeepSeek-V3, arXiv 2412.19437; LLaDA2).

    Scores are sigmoids. A bias per expert, which balanced the load in training, is added for the choice and
    not for the weights. The score of a group is the sum of its two best experts. Of DeepSeek-V2 (arXiv
    2405.04434) scores are a softmax, and that of a group is the one of its best expert.
    """

    #: [num_experts, hidden], float32: the dtype in which logits are computed
    weight: torch.Tensor
    #: [num_experts], float32, or None
    bias: torch.Tensor | None
    top_k: int
    #: groups of consecutive experts, all of the same size
    num_groups: int
    #: number of groups from which the experts of a token are chosen
    top_groups: int
    #: whether the chosen weights are scaled to a sum of 1 before ``scale``
    normalize: bool
    #: factor of the weights
    scale: float
    #: experts that the tokens of a block share, chosen by their best score in it, in place of groups
    #: (LLaDA2.2, as SGLang 0.5.23 computes it); 0: no limit
    capacity: int = 0
    #: with a capacity, tokens of a block: those of a call are whole blocks
    block: int = 1
    #: whether scores are a softmax over all experts
    softmax: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError if the experts do not divide into the groups, or hold fewer than ``top_k``."""
        if self.capacity and not self.top_k <= self.capacity <= len(self.weight):
            raise ValueError(f"{self.top_k} of {self.capacity} of {len(self.weight)} experts")
        size, rest = divmod(len(self.weight), self.num_groups)
        if rest or not 1 <= self.top_groups <= self.num_groups or self.top_k > self.top_groups * size:
            raise ValueError(
                f"{self.top_k} of {len(self.weight)} experts in {self.top_groups} of {self.num_groups} groups"
            )

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights are float32."""
        scores = F.linear(hidden.float(), self.weight)
        scores = scores.softmax(-1) if self.softmax else scores.sigmoid()
        wanted = scores if self.bias is None else scores + self.bias
        if self.capacity:
            best = wanted.unflatten(0, (-1, self.block)).amax(1)
            chosen = best.topk(self.capacity, dim=-1).indices
            closed = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
            wanted = wanted.masked_fill(closed.repeat_interleave(self.block, 0), float("-inf"))
        elif self.top_groups < self.num_groups:
            groups = wanted.unflatten(-1, (self.num_groups, -1))
            best = groups.topk(min(1 if self.softmax else 2, groups.shape[-1]), dim=-1).values.sum(-1)
            chosen = best.topk(self.top_groups, dim=-1).indices
            closed = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
            wanted = groups.masked_fill(closed[..., None], float("-inf")).flatten(1)
        experts = wanted.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, experts


#: the routing rules; other backends implement them, too
Rule = SoftmaxRouter | GroupedSigmoidRouter
