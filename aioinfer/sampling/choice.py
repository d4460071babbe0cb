"""Which code samples on a device, and why. The one place where that is decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from aioinfer.errors import ConfigError
from aioinfer.kernels import triton_obstacle

__all__ = ["SamplingChoice", "choose_sampling"]


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """The code that runs, and the reason in words for people."""

    kernels: Literal["triton", "torch"]
    reason: str


def choose_sampling(
    device: torch.device, wanted: Literal["auto", "triton", "torch"] = "auto"
) -> SamplingChoice:
    """``auto`` is Triton on a CUDA device that it compiles for, else torch's operations. Both draw the same
    tokens.

    Raises ConfigError if Triton is wanted where it cannot run. On a CPU it can if its interpreter was
    chosen, which is for tests.
    """
    if wanted == "torch":
        return SamplingChoice("torch", "asked for")
    if wanted == "auto" and device.type != "cuda":
        return SamplingChoice("torch", f"the device is a {device.type}")
    obstacle = triton_obstacle(device)
    if obstacle is None:
        return SamplingChoice("triton", "asked for" if wanted == "triton" else "the device is CUDA")
    if wanted == "triton":
        raise ConfigError(f"sampling: triton was asked for, and {obstacle}")
    return SamplingChoice("torch", obstacle)
