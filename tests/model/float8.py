"""Keys and values of 8 bits in torch, from their description."""

from __future__ import annotations

import torch

__all__ = ["rounded_heads", "widened"]


def rounded_heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Heads [..., D] as e4m3, and the exponents plus 127, uint8 [...], of what they are to be multiplied by.
    On the CPU."""
    largest = x.float().abs().amax(-1)
    # The least power of two that is not smaller; frexp has fractions from a half on.
    fraction, exponent = torch.frexp(largest / 448)
    exponent = (exponent - (fraction == 0.5).int() + 127).where(largest > 0, 0)
    exponent = exponent.where(largest.isfinite(), 255)
    scaled = torch.ldexp(x.double(), (127 - exponent)[..., None])
    return scaled.float().clamp(-448, 448).to(torch.float8_e4m3fn), exponent.to(torch.uint8)


def widened(values: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """The same in float64. On the CPU."""
    return torch.ldexp(values.double(), (exponents.int() - 127)[..., None])
