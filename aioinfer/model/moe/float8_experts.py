"""Float8Experts: experts with weights of floats of 8 bits, as they are stored, or rounded when loaded."""

from __future__ import annotations

import torch

from aioinfer.checkpoint.tensors import Float8Matrix
from aioinfer.errors import ConfigError
from aioinfer.model.float8 import has_nan, rounded_matrix, too_narrow
from aioinfer.model.float8_linear import Float8Layers
from aioinfer.model.moe.experts import Float8ExpertWeights
from aioinfer.model.moe.sparse import ExpertBlocks, StoredExperts

__all__ = ["Float8Experts", "float8_experts"]


class Float8Experts:
    """Experts with weights of 8 bits, by Triton; activations are not rounded."""

    __slots__ = ("stack",)

    def __init__(self, stack: Float8ExpertWeights) -> None:
        """``stack`` is on the device, and not shared with others."""
        self.stack = stack

    @classmethod
    def of(cls, stored: StoredExperts, blocks: ExpertBlocks) -> Float8Experts:
        """Experts in ``blocks``; where these are stored in others, or not so at all, they are rounded. Raises
        ConfigError: a tensor is missing or has another shape."""
        count, hidden, middle = stored.num_experts, stored.hidden, stored.middle
        biases = stored.biases()
        if biases is not None:
            # Which may be a file's, mapped.
            biases = biases[0].clone(), biases[1].clone()
        gate_up = _empty(stored, (count, 2 * middle, hidden), blocks[0])
        down = _empty(stored, (count, hidden, middle), blocks[1])
        made = cls(Float8ExpertWeights(gate_up, down, stored.gate, biases))
        made._take(stored)
        return made

    @property
    def blocks(self) -> ExpertBlocks:
        """Blocks of gate_up and of down."""
        return self.stack.gate_up.block, self.stack.down.block

    def __call__(self, hidden: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        from aioinfer.model.moe.triton_experts import ExpertTuning, fused_experts

        tuning = ExpertTuning.of(hidden.dtype, experts.numel(), len(self.stack.down.values))
        return fused_experts(hidden, self.stack, weights, experts, tuning)

    def set_stored(self, stored: StoredExperts) -> None:
        """Take other experts in place of the present ones, in their blocks: without another rounding if
        they are stored so. In place, for captured graphs read them there."""
        self._take(stored)
        given = stored.biases()
        if self.stack.biases is not None and given is not None:
            for own, bias in zip(self.stack.biases, given, strict=True):
                own.copy_(bias)

    def _take(self, stored: StoredExperts) -> None:
        own = self.stack.gate_up, self.stack.down
        if stored.float8_blocks() == self.blocks:
            for expert, stored_pair in enumerate(stored.each_float8()):
                for stack, matrix in zip(own, stored_pair, strict=True):
                    _copy(stack, expert, matrix)
            return
        for expert, pair in enumerate(stored.each()):
            for stack, weight in zip(own, pair, strict=True):
                _copy(stack, expert, rounded_matrix(weight, stack.block))


def float8_experts(layers: Float8Layers, stored: StoredExperts) -> Float8Experts | None:
    """Experts of floats of 8 bits; None if they are not to be such. Raises ConfigError: NaN is stored."""
    blocks = stored.float8_blocks()
    sizes = stored.hidden, stored.middle
    if blocks is not None and not any(map(too_narrow, blocks, sizes)):
        made = Float8Experts.of(stored, blocks)
        if has_nan(made.stack.gate_up.values) or has_nan(made.stack.down.values):
            raise ConfigError(f"model: the experts of {stored.prefix} have NaN")
        layers.kept_bits.add(8)
        return made
    if not layers.rounds:
        return None
    return Float8Experts.of(stored, ((1, sizes[0]), (1, sizes[1])))


def _empty(stored: StoredExperts, shape: tuple[int, int, int], block: tuple[int, int]) -> Float8Matrix:
    (count, rows, inner), (height, width) = shape, block
    empty = stored.weights.empty
    return Float8Matrix(
        empty(*shape, dtype=torch.float8_e4m3fn),
        empty(count, -(-rows // height), -(-inner // width), dtype=torch.float32),
        block,
    )


def _copy(stack: Float8Matrix, expert: int, matrix: Float8Matrix) -> None:
    stack.values[expert].view(torch.uint8).copy_(matrix.values.view(torch.uint8))
    stack.scales[expert].copy_(matrix.scales)
