"""Experts on torch's own kernels: tokens sorted by expert, then one multiplication per expert or for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from aioinfer.checkpoint.tensors import Float8Matrix
from aioinfer.model.gates import Gate, activated, gated

__all__ = [
    *("ExpertWeights", "Experts", "Float8ExpertWeights"),
    *("GroupedExperts", "LoopExperts", "grouped_mm"),
]


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The weights of a layer's E experts, contiguous and of one dtype."""

    #: [E, 2 * middle, hidden]: the rows of gate, then those of up; without gates [E, middle, hidden]
    gate_up: torch.Tensor
    #: [E, hidden, middle]
    down: torch.Tensor
    gate: Gate = "silu"
    #: [E, 2 * middle] and [E, hidden], or None
    biases: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def plain(self) -> bool:
        """They have no gates."""
        return self.gate_up.shape[1] == self.down.shape[2]

    def inner(self, both: torch.Tensor) -> torch.Tensor:
        """The inputs of the second product from the results of the first one."""
        return activated(self.gate, both) if self.plain else gated(self.gate, *both.chunk(2, dim=-1))


@dataclass(frozen=True, slots=True)
class Float8ExpertWeights:
    """The same of floats of 8 bits: each matrix is a stack, with scales, contiguous both."""

    #: [E, 2 * middle, hidden]; a block may have rows of gate and of up
    gate_up: Float8Matrix
    #: [E, hidden, middle]
    down: Float8Matrix
    gate: Gate = "silu"
    #: biases as those of :class:`ExpertWeights`, not of 8 bits
    biases: tuple[torch.Tensor, torch.Tensor] | None = None


class Experts(Protocol):
    """Computes the experts of every token and their weighted sum."""

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        """Sum over j of ``weights[t, j] * expert[experts[t, j]](hidden[t])``.

        Args:
            hidden: [T, hidden], of the experts' dtype. NaN in one token does not affect other tokens.
            weights: [T, top_k], any floating dtype.
            experts: [T, top_k] int64, each in [0, E).

        Returns:
            [T, hidden] of hidden's dtype
        """


class GroupedExperts:
    """All experts in two calls of ``torch.nn.functional.grouped_mm``.

    On Hopper and Blackwell in bfloat16 the sizes of the groups are read on the device; elsewhere torch
    reads them back and loops.
    """

    __slots__ = ("stack",)

    def __init__(self, stack: ExpertWeights) -> None:
        self.stack = stack

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        stack, top_k = self.stack, experts.shape[1]
        ordered, order = experts.flatten().sort(stable=True)
        every = torch.arange(len(stack.down), device=experts.device)
        ends = torch.searchsorted(ordered, every, right=True, out_int32=True)
        both = grouped_mm(hidden[order // top_k], stack.gate_up.mT, ends)
        if stack.biases is not None:
            both = both + stack.biases[0][ordered]
        outputs = grouped_mm(stack.inner(both), stack.down.mT, ends)
        if stack.biases is not None:
            outputs = outputs + stack.biases[1][ordered]
        return _combine(outputs, order, weights)


class LoopExperts:
    """One expert after the other. Reads the number of tokens of each back to the host: meant for the CPU."""

    __slots__ = ("stack",)

    def __init__(self, stack: ExpertWeights) -> None:
        self.stack = stack

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        stack, top_k = self.stack, experts.shape[1]
        ordered, order = experts.flatten().sort(stable=True)
        counts = ordered.bincount(minlength=len(stack.down)).tolist()
        inputs = hidden[order // top_k]
        outputs = torch.empty_like(inputs)
        end = 0
        for expert, count in enumerate(counts):
            if count:
                start, end = end, end + count
                first, second = (None, None) if stack.biases is None else (b[expert] for b in stack.biases)
                both = F.linear(inputs[start:end], stack.gate_up[expert], first)
                outputs[start:end] = F.linear(stack.inner(both), stack.down[expert], second)
        return _combine(outputs, order, weights)


def grouped_mm(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Rows [P, K], in groups that end at ``ends`` [E] int32, times their group's matrix [K, N]: [P, N]."""
    # Public since torch 2.10.
    product: torch.Tensor = F.grouped_mm(rows, matrices, offs=ends)
    return product


def _combine(outputs: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The weighted sum of each token's experts, [T, hidden], from outputs [T * top_k, hidden] of which row i
    belongs to pair ``order[i]``. The order of addition does not depend on other tokens."""
    pairs = torch.empty_like(outputs)
    pairs[order] = outputs
    # In float32, which saves top_k roundings.
    weighted = pairs.view(*weights.shape, outputs.shape[1]).float() * weights.float()[..., None]
    return weighted.sum(1).to(outputs.dtype)
