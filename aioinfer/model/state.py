"""StatePool: the recurrent state of layers that keep a state of fixed size instead of keys and values.

Such a layer (a short convolution, a gated delta rule) reads the state of a row's sequence as it was before
the row's first token, and leaves it as it is after the last one. A *cell* holds one such state of all
layers::

    cell 0                     null: reads as zeros, the state of an empty sequence; what padding writes there
                               is never read
    cells 1 .. num_slots       of the slot of the same number
    further cells              snapshots: states at the end of cached prefixes

A row may read one cell and write another, so a snapshot is taken and used without a copy. No cell is written
by one row of a step and accessed by another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch

from aioinfer.model.attention.pool import pool_zeros

__all__ = ["RowStates", "StatePool", "StateShape"]


class StateShape(NamedTuple):
    """One tensor of a cell."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class StatePool:
    """The cells of all layers. ``tensors[i]``: of ``shapes[i]``, ``[num_cells + 1, *shape]``, zeros at
    first."""

    __slots__ = ("num_cells", "tensors")

    def __init__(self, shapes: Sequence[StateShape], num_cells: int, device: torch.device) -> None:
        self.num_cells = num_cells
        self.tensors = [
            pool_zeros((num_cells + 1, *shape), dtype, device, "recurrent states") for shape, dtype in shapes
        ]


@dataclass(slots=True)
class RowStates:
    """The cells of the rows of a step."""

    pool: StatePool
    #: [R] int64, the cell that row r starts from; 0: it starts from zeros
    read: torch.Tensor
    #: [R] int64, the cell that holds the state after row r
    write: torch.Tensor
    #: [R] int64, positions of row r that this state includes: a draft may be wrong, and a state cannot be
    #: taken back; None: all of them
    kept: torch.Tensor | None = None
