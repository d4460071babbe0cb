"""Matrices of floats of 8 bits (e4m3), with a scale for each block."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from aioinfer.checkpoint.formats.base import row_slices
from aioinfer.checkpoint.tensors import Float8Matrix

__all__ = ["LEAST_WIDTH", "has_nan", "rounded_matrix", "too_narrow"]

_LARGEST = 448.0
#: blocks that the kernels take are multiples of this wide, or as wide as the matrix
LEAST_WIDTH = 32


def too_narrow(block: tuple[int, int], inner: int) -> bool:
    """Whether the kernels cannot compute a matrix with blocks of (height, width)."""
    return block[1] < inner and block[1] % LEAST_WIDTH != 0


def has_nan(values: torch.Tensor) -> bool:
    """Whether there is NaN in a matrix of e4m3, or in a stack of such."""
    raw = values.view(torch.uint8)
    # One after the other, to save memory.
    found = [((part & 0x7F) == 0x7F).any() for part in (raw if raw.dim() > 2 else [raw])]
    return bool(torch.stack(found).any())


def rounded_matrix(weight: torch.Tensor, block: tuple[int, int]) -> Float8Matrix:
    """A weight [rows, inner] in floats of 8 bits, on its device: the largest of a block of (height, width)
    becomes the largest of these."""
    (rows, inner), (height, width) = weight.shape, block
    values = torch.empty(rows, inner, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(-(-rows // height), -(-inner // width), device=weight.device)
    for part in row_slices(rows, inner, height):
        wide = weight[part].float()
        count = len(wide)
        wide = F.pad(wide, (0, -inner % width, 0, -count % height))
        wide = wide.view(-1, height, scales.shape[1], width)
        factors = wide.abs().amax((1, 3)) / _LARGEST
        factors = factors.masked_fill_(factors == 0, 1.0)
        scales[part.start // height : -(-part.stop // height)] = factors
        wide = (wide / factors[:, None, :, None]).clamp_(-_LARGEST, _LARGEST)
        values[part] = wide.view(-1, scales.shape[1] * width)[:count, :inner].to(torch.float8_e4m3fn)
    return Float8Matrix(values, scales, block)
