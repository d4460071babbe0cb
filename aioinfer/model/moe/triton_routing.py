"""Routing by two Triton kernels: one computes the logits, the other chooses experts and weights.

With torch's operations a router takes half a dozen launches or more, and the library that computes its logits
adds in different orders for different numbers of tokens. Here a token's experts and weights have the same
bits in any batch.

The rules are those of :mod:`aioinfer.model.moe.routing`; among experts of equal score the first is chosen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from aioinfer.model.attention.triton_common import INTERPRETED
from aioinfer.model.moe.routing import GroupedSigmoidRouter, SoftmaxRouter

__all__ = ["TritonRouter"]

# Scores of experts that are not to be chosen, from the highest: a logit that is not finite, a group that was
# not chosen, an expert chosen before, a lane without an expert. All are below any real score, and the sum of
# two is finite.
_NOT_FINITE = tl.constexpr(-1e37)
_CLOSED = tl.constexpr(-2e37)
_TAKEN = tl.constexpr(-3e37)
_ABSENT = tl.constexpr(-4e37)


@triton.jit(do_not_specialize=["tokens"])
def _logits_kernel(
    hidden: tl.tensor, weight: tl.tensor, logits: tl.tensor, tokens: tl.tensor, stride_hidden: tl.tensor,
    SIZE: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """logits [tokens, EXPERTS] = hidden . weight^T, added in float32 in a fixed order. Grid (token blocks,
    expert blocks)."""
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    # Tokens and experts out of range repeat the work of valid ones and are not stored.
    x = hidden + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * stride_hidden
    w = weight + tl.minimum(expert, EXPERTS - 1)[:, None] * SIZE
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for start in tl.range(0, SIZE, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        if SIZE % BLOCK_K == 0:
            left = tl.load(x + at[None, :])
            right = tl.load(w + at[None, :])
        else:
            left = tl.load(x + at[None, :], mask=(at < SIZE)[None, :], other=0.0)
            right = tl.load(w + at[None, :], mask=(at < SIZE)[None, :], other=0.0)
        if WIDEN:
            left = left.to(tl.float32)
            right = right.to(tl.float32)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    to = logits + token.to(tl.int64)[:, None] * EXPERTS + expert[None, :]
    inside = (token < tokens)[:, None] & (expert < EXPERTS)[None, :]
    tl.store(to, acc.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _first_best(scores: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """The lane of the best score, the first among equals. No score is NaN."""
    return tl.min(tl.where(scores == tl.max(scores, 0), lane, scores.shape[0]), 0)


@triton.jit
def _close_groups(
    scores: tl.tensor, BLOCK: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr
) -> tl.tensor:
    """``scores`` [BLOCK] with _CLOSED in all but the best groups; a group's score is that of its two best."""
    size: tl.constexpr = BLOCK // GROUPS
    grouped = tl.reshape(scores, [GROUPS, size])
    member = tl.arange(0, size)[None, :]
    best = tl.max(grouped, 1)
    goodness = best
    if size > 1:
        first = tl.min(tl.where(grouped == best[:, None], member, size), 1)
        goodness += tl.max(tl.where(member == first[:, None], _ABSENT, grouped), 1)
    group = tl.arange(0, GROUPS)
    is_open = tl.zeros([GROUPS], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        here = group == _first_best(goodness, group)
        is_open = tl.where(here, 1, is_open)
        goodness = tl.where(here, float("-inf"), goodness)
    return tl.reshape(tl.where((is_open > 0)[:, None], grouped, _CLOSED), [BLOCK])


@triton.jit
def _choose_kernel(
    logits: tl.tensor, bias: tl.tensor, weights: tl.tensor, experts: tl.tensor, scale: tl.tensor,
    EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr, BLOCK_TOP: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    NORMALIZE: tl.constexpr,
) -> None:  # fmt: skip
    """The TOP_K experts of a token in ``experts`` [tokens, TOP_K], and their ``weights``. Grid (tokens,)."""
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK)
    there = lane < EXPERTS
    logit = tl.load(logits + token * EXPERTS + lane, mask=there, other=0.0).to(tl.float32)
    # Any experts will do for a token with NaN, but the search below needs numbers.
    logit = tl.where(tl.abs(logit) < 1e37, logit, _NOT_FINITE)
    if SIGMOID:
        shrunk = tl.exp(-tl.abs(logit))
        shares = tl.where(logit < 0.0, shrunk, 1.0) / (1.0 + shrunk)
    else:
        peak = tl.max(tl.where(there, logit, _ABSENT), 0)
        shrunk = tl.where(there, tl.exp(tl.minimum(logit - peak, 0.0)), 0.0)
        shares = shrunk / tl.sum(shrunk, 0)
    scores = shares
    if BIASED:
        scores += tl.load(bias + lane, mask=there, other=0.0)
    scores = tl.where(there, scores, _ABSENT)
    if TOP_GROUPS < GROUPS:
        scores = _close_groups(scores, BLOCK, GROUPS, TOP_GROUPS)
    place = tl.arange(0, BLOCK_TOP)
    chosen = tl.zeros([BLOCK_TOP], tl.int32)
    weight = tl.zeros([BLOCK_TOP], tl.float32)
    for at in tl.static_range(TOP_K):
        expert = _first_best(scores, lane)
        chosen = tl.where(place == at, expert, chosen)
        weight = tl.where(place == at, tl.sum(tl.where(lane == expert, shares, 0.0), 0), weight)
        scores = tl.where(lane == expert, _TAKEN, scores)
    if NORMALIZE:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    weight = weight * scale
    to = token * TOP_K + place
    tl.store(weights + to, weight.to(weights.dtype.element_ty), mask=place < TOP_K)
    tl.store(experts + to, chosen, mask=place < TOP_K)


@dataclass(frozen=True, slots=True)
class TritonRouter:
    """A routing rule in Triton; see :class:`~aioinfer.model.moe.routing.Router`."""

    rule: SoftmaxRouter | GroupedSigmoidRouter

    @staticmethod
    def unsupported_reason(rule: SoftmaxRouter | GroupedSigmoidRouter) -> str | None:
        """Reason why the kernels cannot follow a rule; None if they can."""
        if isinstance(rule, SoftmaxRouter):
            if rule.scales is not None:
                return "scales of the weights"
            if rule.balance is not None:
                return "a bias of the choice"
            return None if rule.bias is None else "a bias of the scores"
        if rule.capacity:
            return "experts that a block shares"
        if rule.softmax:
            return "a softmax in float32"
        if rule.top_groups == rule.num_groups:
            return None
        sizes = rule.num_groups, len(rule.weight) // rule.num_groups
        return f"{sizes[0]} groups of {sizes[1]} experts" if any(n & (n - 1) for n in sizes) else None

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route by two launches; nothing is read back."""
        rule, (tokens, size) = self.rule, hidden.shape
        grouped = rule if isinstance(rule, GroupedSigmoidRouter) else None
        num_experts, top_k = len(rule.weight), rule.top_k
        rounded = torch.float32 if grouped else hidden.dtype
        logits = torch.empty(tokens, num_experts, dtype=rounded, device=hidden.device)
        weights = torch.empty(tokens, top_k, dtype=rounded, device=hidden.device)
        experts = torch.empty(tokens, top_k, dtype=torch.int64, device=hidden.device)
        if tokens == 0:
            return weights, experts
        hidden = hidden if hidden.stride(1) == 1 else hidden.contiguous()
        wide = rule.weight.dtype == torch.float32
        _logits_kernel[(-(-tokens // 16), -(-num_experts // 16))](
            hidden, rule.weight, logits, tokens, hidden.stride(0), SIZE=size, EXPERTS=num_experts,
            BLOCK_M=16, BLOCK_E=16, BLOCK_K=64 if wide else 256, WIDEN=wide or INTERPRETED,
            num_warps=4, num_stages=3, enable_fp_fusion=True,
        )  # fmt: skip
        block = triton.next_power_of_2(num_experts)
        bias = grouped.bias if grouped else None
        _choose_kernel[(tokens,)](
            logits, logits if bias is None else bias, weights, experts, grouped.scale if grouped else 1.0,
            EXPERTS=num_experts, BLOCK=block, TOP_K=top_k, BLOCK_TOP=triton.next_power_of_2(top_k),
            SIGMOID=grouped is not None, BIASED=bias is not None, NORMALIZE=rule.normalize,
            GROUPS=grouped.num_groups if grouped else 1, TOP_GROUPS=grouped.top_groups if grouped else 1,
            num_warps=1 if block <= 128 else 2, enable_fp_fusion=True,
        )  # fmt: skip
        return weights, experts
