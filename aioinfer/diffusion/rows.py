"""Tensors with a first dimension of rows, by name: what a block and its algorithm remember."""

from __future__ import annotations

import torch

__all__ = ["Rows"]

#: name -> [R, ...]
Rows = dict[str, torch.Tensor]
