"""Norm: the weights of a norm of the residual, or of the output of one part of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Norm"]


@dataclass(frozen=True, slots=True)
class Norm:
    """A root mean square norm (Zhang and Sennrich, 2019), or, with a bias, a layer norm (Ba et al., arXiv
    1607.06450)."""

    #: [size], in the model's dtype: the normed values are rounded before they are multiplied by it, as in
    #: Llama, but by native kernels; or float32: only the product is rounded, as in Gemma
    weight: torch.Tensor
    #: added to the mean square, or to the variance
    eps: float
    #: [size], or None
    bias: torch.Tensor | None = None
