"""SparseMLP: the feed-forward part of a layer with a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioinfer.checkpoint.tensors import Float8Matrix, QuantisedMatrix, Rounding
from aioinfer.model.gates import Gate
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.experts import Experts, ExpertWeights
from aioinfer.model.moe.routing import Router
from aioinfer.model.weights import Weights, joined_block, joined_float8, joined_quantised, joint_rounding

__all__ = ["GATE_UP_DOWN", "TOGETHER", "ExpertBlocks", "GatedExpert", "SparseMLP", "StoredExperts"]

#: heights and widths of the blocks of gate_up and of down
ExpertBlocks = tuple[tuple[int, int], tuple[int, int]]
#: names of tensors, and, where they are stacks, the number of a matrix
_Parts = list[tuple[str, int | None]]
#: the usual names of the tensors of an expert
GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
#: and of the tensors of all experts, gate and up in one
TOGETHER = ("gate_up_proj", "down_proj")


@dataclass(slots=True)
class SparseMLP:
    """A router, its experts, and the experts shared by all tokens."""

    router: Router
    experts: Experts
    #: the shared experts, combined into one; None if there are none
    shared: FeedForward | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        weights, experts = self.router(hidden)
        mixed = self.experts(hidden, weights, experts)
        return mixed if self.shared is None else mixed + self.shared(hidden)


@dataclass(slots=True)
class GatedExpert:
    """A shared expert whose output is scaled, as a whole, by the sigmoid of a product with the token
    (Qwen2-MoE)."""

    expert: FeedForward
    #: [1, hidden]
    gate: torch.Tensor

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.gate).sigmoid() * self.expert(hidden)


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """The experts of a layer in a checkpoint.

    A checkpoint stores them one by one, or stacked, with gate and up in one tensor (transformers) or in two
    (dFactory). They can be read once, by :meth:`stacked` or by :meth:`each`.
    """

    weights: Weights
    prefix: str
    num_experts: int
    hidden: int
    middle: int
    #: names of the tensors of an expert; of one without gates, two
    names: tuple[str, ...] = GATE_UP_DOWN
    gate: Gate = "silu"
    #: whether stacks in three tensors have biases
    biased: bool = False
    #: and of the tensors of all of them, gate and up in one
    together: tuple[str, str] = TOGETHER

    @property
    def rows(self) -> int:
        """Outputs of an expert's first product: of gate and up, or of up alone."""
        return (len(self.names) - 1) * self.middle

    def biases(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """[num_experts, 2 * middle], those of gates first, and [num_experts, hidden]; None if there are none.
        Raises ConfigError as :meth:`stacked`."""
        if not self.biased:
            return None
        gate, up, down = (
            self.weights.take(f"{self.prefix}.{name}_bias", (self.num_experts, size))
            for name, size in zip(GATE_UP_DOWN, (self.middle, self.middle, self.hidden), strict=True)
        )
        return torch.cat((gate, up), dim=1), down

    def stacked(self) -> ExpertWeights:
        """All experts, read into place without a second copy. Raises ConfigError if a tensor is missing or
        has another shape."""
        weights, prefix, middle = self.weights, self.prefix, self.middle
        if self._together:
            return ExpertWeights(*self._take_together(), self.gate, self.biases())
        gate_up = weights.empty(self.num_experts, self.rows, self.hidden)
        down = weights.empty(self.num_experts, self.hidden, middle)
        if self._apart:
            for part, name in zip(
                (gate_up[:, :middle], gate_up[:, middle:], down), GATE_UP_DOWN, strict=True
            ):
                weights.take_into(part, f"{prefix}.{name}")
            return ExpertWeights(gate_up, down, self.gate, self.biases())
        for expert in range(self.num_experts):
            self._take_one(expert, gate_up[expert], down[expert])
        return ExpertWeights(gate_up, down, self.gate)

    def declare(self) -> None:
        """Count their tensors as taken, without reading them. Raises ConfigError as :meth:`stacked`."""
        for name, shape in self.shapes().items():
            self.weights.declare(f"{self.prefix}.{name}", shape)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of their tensors, by name under the prefix."""
        count, hidden, middle = self.num_experts, self.hidden, self.middle
        if self._together:
            return dict(
                zip(self.together, ((count, self.rows, hidden), (count, hidden, middle)), strict=True)
            )
        names = GATE_UP_DOWN if self._apart else self.names
        first = [(middle, hidden)] * (len(names) - 1)
        one = dict(zip(names, (*first, (hidden, middle)), strict=True))
        if self._apart:
            return {name: (count, *shape) for name, shape in one.items()}
        return {f"{at}.{name}.weight": shape for name, shape in one.items() for at in range(count)}

    def each(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the weights of each expert, [rows, hidden] and [hidden, middle]. The next pair may
        overwrite the memory of the previous one. Raises ConfigError as :meth:`stacked`."""
        if self._together:
            yield from zip(*self._take_together(), strict=True)
            return
        gate_up = self.weights.empty(self.rows, self.hidden)
        if self._apart:
            gate, up, down = (
                self.weights.take(f"{self.prefix}.{name}", shape) for name, shape in self.shapes().items()
            )
            for expert in range(self.num_experts):
                torch.cat((gate[expert], up[expert]), out=gate_up)
                yield gate_up, down[expert]
            return
        one = self.weights.empty(self.hidden, self.middle)
        for expert in range(self.num_experts):
            self._take_one(expert, gate_up, one)
            yield gate_up, one

    def roundings(self) -> tuple[Rounding, Rounding] | None:
        """How gate and up, and down, are quantised in the checkpoint; None if not all experts are."""
        every = zip(*map(self._matrices, range(self.num_experts)), strict=True)
        names = [dict.fromkeys(name for each in part for name, _ in each) for part in every]
        first, second = (
            joint_rounding([self.weights.rounding(name) for name in part], width)
            for part, width in zip(names, (self.hidden, self.middle), strict=True)
        )
        return None if first is None or second is None else (first, second)

    def each_quantised(self) -> Iterator[tuple[QuantisedMatrix, QuantisedMatrix]]:
        """Yield the matrices of each expert as they are stored, on the CPU, in :meth:`roundings`."""
        roundings = self.roundings()
        assert roundings is not None, "they are not quantised"
        for expert in range(self.num_experts):
            gate_up, down = (
                joined_quantised([self.weights.quantised(*part) for part in parts], rounding)
                for parts, rounding in zip(self._matrices(expert), roundings, strict=True)
            )
            yield gate_up, down

    @property
    def matrices(self) -> list[str]:
        """The full names of their tensors that are no biases."""
        return [f"{self.prefix}.{name}" for name in self.shapes() if not name.endswith("bias")]

    def _matrices(self, expert: int) -> tuple[_Parts, _Parts]:
        """The parts of gate and up, and of down."""
        prefix = self.prefix
        if self._together:
            first, second = self.together
            return [(f"{prefix}.{first}", expert)], [(f"{prefix}.{second}", expert)]
        if self._apart:
            parts: _Parts = [(f"{prefix}.{name}", expert) for name in GATE_UP_DOWN]
        else:
            parts = [(f"{prefix}.{expert}.{name}.weight", None) for name in self.names]
        return parts[:-1], parts[-1:]

    def float8_blocks(self) -> ExpertBlocks | None:
        """The blocks of gate_up and of down, if all experts are stored as floats of 8 bits, in blocks of the
        same sizes; else None. They count as taken."""
        self.declare()
        found: ExpertBlocks | None = None
        for expert in self._float8_parts():
            parts = [part for part in expert if part is not None]
            blocks = joined_block(parts[:-1]) if len(parts) == len(expert) else None
            if blocks is None or found not in (None, (blocks, parts[-1].block)):
                return None
            found = blocks, parts[-1].block
        return found

    def each_float8(self) -> Iterator[tuple[Float8Matrix, Float8Matrix]]:
        """Yield the matrices of each expert as they are stored, on the CPU, in :meth:`float8_blocks`."""
        for expert in self._float8_parts():
            *both, down = (part for part in expert if part is not None)
            yield joined_float8(both), down

    def _float8_parts(self) -> Iterator[list[Float8Matrix | None]]:
        """Yield each expert's gate and up, or both in one, and down."""
        read, prefix = self.weights.float8, self.prefix
        if self._together or self._apart:
            names = self.together if self._together else GATE_UP_DOWN
            stacks = [read(f"{prefix}.{name}") for name in names]
            for expert in range(self.num_experts):
                yield [None if stack is None else _one_of(stack, expert) for stack in stacks]
            return
        for expert in range(self.num_experts):
            yield [read(f"{prefix}.{expert}.{name}.weight") for name in self.names]

    @property
    def _together(self) -> bool:
        return f"{self.prefix}.{self.together[0]}" in self.weights

    @property
    def _apart(self) -> bool:
        return f"{self.prefix}.gate_proj" in self.weights

    def _take_together(self) -> tuple[torch.Tensor, torch.Tensor]:
        gate_up, down = (
            self.weights.take(f"{self.prefix}.{name}", shape) for name, shape in self.shapes().items()
        )
        return gate_up, down

    def _take_one(self, expert: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        *first, out = (f"{self.prefix}.{expert}.{name}.weight" for name in self.names)
        for part, name in zip(gate_up.split(self.middle), first, strict=True):
            self.weights.take_into(part, name)
        self.weights.take_into(down, out)


def _one_of(stack: Float8Matrix, at: int) -> Float8Matrix:
    return Float8Matrix(stack.values[at], stack.scales[at], stack.block)
