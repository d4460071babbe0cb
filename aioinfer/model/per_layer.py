"""Inputs by layer: a small vector of each token for every layer, added to its output residual (Gemma 4).

They depend on the token alone: a row of a table, and a projection of the token's vector. The table is larger
than the rest of a small model; on a CPU it stays in the mapped file, and only the rows of tokens that occur
are read. One that is quantised stays so in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from aioinfer.model.gates import Gate, activated
from aioinfer.model.linear import Linear
from aioinfer.model.norm import Norm
from aioinfer.model.operations.base import Operations

__all__ = ["PerLayerInputs", "PerLayerPart"]


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """The source of the vectors of a model."""

    #: [vocab_size, layers * size]; a tensor of the model's dtype is the checkpoint's own; a linear layer has
    #: quantised rows, which native code reads
    table: torch.Tensor | Linear
    #: hidden to [T, layers * size], of the vectors of tokens
    projection: Linear
    #: norm of each layer's part of the projection, [size]
    norm: Norm
    #: factors of the table's rows, of the projection, and of the sum of both
    table_scale: float
    projection_scale: float
    sum_scale: float
    #: number of layers
    layers: int

    @property
    def size(self) -> int:
        """Elements of one layer's vector."""
        return self.norm.weight.numel()

    def __call__(self, ids: torch.Tensor, vectors: torch.Tensor, operations: Operations) -> torch.Tensor:
        """[T, layers, size] of tokens [T] and their vectors [T, hidden], scaled as the residual has them."""
        assert isinstance(self.table, torch.Tensor), "of quantised rows native code reads those of a step"
        words = F.embedding(ids, self.table) * self.table_scale
        projected = self.projection(vectors) * self.projection_scale
        _, normed = operations.add_norm(projected.view(-1, self.size), None, self.norm)
        return (normed.view(len(ids), self.layers, self.size) + words.view(-1, self.layers, self.size)) * (
            self.sum_scale
        )


@dataclass(frozen=True, slots=True)
class PerLayerPart:
    """The use of a layer's vectors: ``norm(out(gate(residual) * vector))`` is added to the residual."""

    #: hidden to size, through ``function``
    gate: Linear
    function: Gate
    out: Linear
    post_norm: Norm

    def __call__(self, residual: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """[T, hidden], not yet normed, from [T, hidden] and the layer's vectors [T, size]."""
        return self.out(activated(self.function, self.gate(residual)) * vectors)
