"""Routing: which experts a token goes to, and with which weights.

Everything stays on the device with shapes that follow from the number of tokens alone, so that nothing is
read back and a step can be captured. Among experts of exactly equal score the choice is ``torch.topk``'s.
A token that is not a number (padding may be) is sent to some experts all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

__all__ = ["GroupedSigmoidRouter", "Router", "Rule", "SoftmaxRouter"]


class Router(Protocol):
    """Sends every token to ``top_k`` different experts."""

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[T, hidden] to the weights [T, top_k], some float type, and the experts [T, top_k], int64."""


@dataclass(frozen=True, slots=True)
class SoftmaxRouter:
    """The likeliest experts under a softmax over all of them (Qwen3-MoE; Switch Transformer, arXiv
    2101.03961, with more than one)."""

    #: [num_experts, hidden]
    weight: torch.Tensor
    top_k: int
    #: the chosen weights are made to sum up to 1
    normalize: bool

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Router`. Weights are rounded to the type of ``hidden``, as transformers has them."""
        shares = F.linear(hidden, self.weight).softmax(-1, dtype=torch.float32)
        weights, experts = shares.topk(self.top_k, dim=-1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights.to(hidden.dtype), experts


@dataclass(frozen=True, slots=True)
class GroupedSigmoidRouter:
    """The best experts of the best groups of experts (DeepSeek-V3, arXiv 2412.19437; LLaDA2).

    Scores are sigmoids. A bias per expert, which balanced the load in training, takes part in the choice
    and not in the weights. A group is as good as its two best experts together.
    """

    #: [num_experts, hidden], float32: logits are computed in it
    weight: torch.Tensor
    #: [num_experts], float32, or None
    bias: torch.Tensor | None
    top_k: int
    #: consecutive experts form a group, each as large as any other
    num_groups: int
    #: groups that a token may go to
    top_groups: int
    #: the chosen weights are made to sum up to ``scale``
    normalize: bool
    scale: float

    def __post_init__(self) -> None:
        """Raises ValueError if the experts do not divide into such groups."""
        size, rest = divmod(len(self.weight), self.num_groups)
        if rest or not 1 <= self.top_groups <= self.num_groups or self.top_k > self.top_groups * size:
            raise ValueError(
                f"{self.top_k} of {len(self.weight)} experts in {self.top_groups} of {self.num_groups} groups"
            )

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`Router`. Weights are float32."""
        scores = F.linear(hidden.float(), self.weight).sigmoid()
        wanted = scores if self.bias is None else scores + self.bias
        if self.top_groups < self.num_groups:
            groups = wanted.unflatten(-1, (self.num_groups, -1))
            best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
            chosen = best.topk(self.top_groups, dim=-1).indices
            closed = torch.ones_like(best, dtype=torch.bool).scatter(1, chosen, False)
            wanted = groups.masked_fill(closed[..., None], float("-inf")).flatten(1)
        experts = wanted.topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, experts)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * self.scale, experts


#: what routers on other kernels than torch's follow
Rule = SoftmaxRouter | GroupedSigmoidRouter
