"""Rows: tensors with a first dimension of rows, by name: the state of a block or of its algorithm."""

from __future__ import annotations

import torch

__all__ = ["Rows"]

#: name -> [R, ...]
Rows = dict[str, torch.Tensor]
