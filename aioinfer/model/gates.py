"""Gates: the functions between the two products of a feed-forward part."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

__all__ = ["CONFIG_GATES", "Gate", "activated"]

#: SiLU (Elfwing et al., arXiv 1702.03118), or GELU by its tangent formula (Hendrycks and Gimpel, arXiv
#: 1606.08415)
Gate = Literal["silu", "gelu_tanh"]

#: by the names that configs have for them
CONFIG_GATES: dict[str, Gate] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def activated(gate: Gate, values: torch.Tensor) -> torch.Tensor:
    """The function of each element, in the tensor's dtype."""
    return F.silu(values) if gate == "silu" else F.gelu(values, approximate="tanh")
