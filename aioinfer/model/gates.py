"""Gates: the functions between the two products of a feed-forward part."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

__all__ = ["CONFIG_GATES", "LIMIT", "STEEPNESS", "Gate", "activated", "gated"]

#: SiLU (Elfwing et al., arXiv 1702.03118), GELU by its tangent formula or exactly (Hendrycks and Gimpel,
#: arXiv 1606.08415), or the one of gpt-oss, see :func:`gated`. Triton has no exact GELU: it is only of image
#: encoders, which are torch's on CUDA.
Gate = Literal["silu", "gelu_tanh", "gelu", "clamped_silu"]

#: gates by their names in configs
CONFIG_GATES: dict[str, Gate] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

#: constants of the clamped gate, as in all of gpt-oss's configs
STEEPNESS, LIMIT = 1.702, 7.0


def activated(gate: Gate, values: torch.Tensor) -> torch.Tensor:
    """The function of each element, in the tensor's dtype; not of the clamped gate."""
    if gate == "silu":
        return F.silu(values)
    return F.gelu(values, approximate="none" if gate == "gelu" else "tanh")


def gated(gate: Gate, gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``up`` by its gates, elementwise: ``gate(gates) * up``.

    The clamped gate is ``x * sigmoid(1.702 * x) * (up + 1)``, of gates x up to 7 and ``up`` between -7 and 7.
    """
    if gate != "clamped_silu":
        return activated(gate, gates) * up
    gates, up = gates.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gates * torch.sigmoid(gates * STEEPNESS) * (up + 1)
