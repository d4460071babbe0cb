"""Gates: the functions between the two products of a feed-forward part."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

__all__ = ["CONFIG_GATES", "LIMIT", "PLAIN_GATES", "STEEPNESS", "Gate", "activated", "gated"]

#: SiLU (Elfwing et al., arXiv 1702.03118), GELU by its tangent formula or exactly (Hendrycks and Gimpel,
#: arXiv 1606.08415), the one of gpt-oss, see :func:`gated`, ReLU, or its square (So et al., arXiv
#: 2109.08668). Triton has no exact GELU, nor ReLU: they are of parts without gates, and of image encoders.
Gate = Literal["silu", "gelu_tanh", "gelu", "clamped_silu", "relu", "relu_squared"]

#: gates by their names in configs
CONFIG_GATES: dict[str, Gate] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
#: those of parts without gates
PLAIN_GATES: dict[str, Gate] = {
    **CONFIG_GATES,
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu_squared",
}

#: constants of the clamped gate, as in all of gpt-oss's configs
STEEPNESS, LIMIT = 1.702, 7.0


def activated(gate: Gate, values: torch.Tensor) -> torch.Tensor:
    """The function of each element, in the tensor's dtype; not of the clamped gate."""
    if gate == "silu":
        return F.silu(values)
    if gate in ("relu", "relu_squared"):
        return F.relu(values) if gate == "relu" else F.relu(values).square()
    return F.gelu(values, approximate="none" if gate == "gelu" else "tanh")


def gated(gate: Gate, gates: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """``up`` by its gates, elementwise: ``gate(gates) * up``.

    The clamped gate is ``x * sigmoid(1.702 * x) * (up + 1)``, of gates x up to 7 and ``up`` between -7 and 7.
    """
    if gate != "clamped_silu":
        return activated(gate, gates) * up
    gates, up = gates.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    return gates * torch.sigmoid(gates * STEEPNESS) * (up + 1)
