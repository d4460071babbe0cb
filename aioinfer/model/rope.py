"""Rotary position embedding (Su et al., 2021) in the variants of the Llama-like families."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Rope", "Rotary", "rotate", "supported"]


def supported(config: Any) -> bool:
    """Whether one table by position gives the config's variant: dynamic NTK and LongRoPE depend on the
    length of the sequence, some models rotate a part of each head only or have a table per layer type."""
    parameters = _parameters(config)
    return (
        parameters.get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
        and parameters.get("partial_rotary_factor", 1.0) == 1.0
        and not any(isinstance(value, dict) for value in parameters.values())
    )


@dataclass(frozen=True, slots=True)
class Rotary:
    """Factors for the tokens of a step, [T, 1, head_dim] each, in the model's type."""

    cos: torch.Tensor
    #: with the sign of rotate-half: the first half of each head is negated
    sin: torch.Tensor


class Rope:
    """Cosines and sines by position, computed once in float32."""

    __slots__ = ("_cos", "_sin")

    def __init__(
        self, config: Any, head_dim: int, max_positions: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        inv_freq, scaling = _frequencies(config, head_dim)
        angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        #: [positions, 1, head_dim]; the sine carries the sign of rotate-half
        self._cos = (angles.cos() * scaling).to(dtype).unsqueeze(1).to(device)
        sin = angles.sin() * scaling
        sin[:, : head_dim // 2] *= -1
        self._sin = sin.to(dtype).unsqueeze(1).to(device)

    def at(self, positions: torch.Tensor) -> Rotary:
        """Factors for tokens at these positions [T]."""
        return Rotary(self._cos[positions], self._sin[positions])


def rotate(heads: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Rotate [T, heads, head_dim]."""
    half = heads.shape[-1] // 2
    return heads * rotary.cos + heads.roll(half, dims=-1) * rotary.sin


def _frequencies(config: Any, head_dim: int) -> tuple[torch.Tensor, float]:
    parameters = _parameters(config)
    kind = parameters.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        return 1.0 / (parameters["rope_theta"] ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inv_freq.float(), float(scaling)


def _parameters(config: Any) -> dict[str, Any]:
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return parameters
