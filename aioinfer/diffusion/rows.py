"""Tensors with a first dimension of rows, by name: what a block and its algorithm remember."""

from __future__ import annotations

import torch

__all__ = ["Rows", "put_", "take"]

#: name -> [R, ...]
Rows = dict[str, torch.Tensor]


def take(table: Rows, rows: torch.Tensor) -> Rows:
    """Some rows of a table, copied; ``rows`` is [N] int64, in any order."""
    return {name: column.index_select(0, rows) for name, column in table.items()}


def put_(table: Rows, rows: torch.Tensor, values: Rows) -> None:
    """Write ``values``, of N rows, over the rows of a table; ``rows`` is [N] int64 without repetition."""
    for name, column in table.items():
        column.index_copy_(0, rows, values[name])
