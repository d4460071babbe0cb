"""Which code samples on a device, and why. The one place where that is decided."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from aioinfer.errors import ConfigError

__all__ = ["SamplingChoice", "choose_sampling"]

#: what the attention kernels ask for, too (Ampere)
_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """The code that runs, and the reason in words for people."""

    kernels: Literal["triton", "torch"]
    reason: str


@cache
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
    obstacle = _obstacle(device)
    if obstacle is None:
        return SamplingChoice("triton", "asked for" if wanted == "triton" else "the device is CUDA")
    if wanted == "triton":
        raise ConfigError(f"sampling: triton was asked for, and {obstacle}")
    return SamplingChoice("torch", obstacle)


def _obstacle(device: torch.device) -> str | None:
    """What keeps Triton's kernels from running there, if anything does."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        return "the device is older than compute capability {}.{}".format(*_CAPABILITY)
    from aioinfer.sampling import triton_noise

    if (device.type == "cuda") == triton_noise.INTERPRETED:
        return "TRITON_INTERPRET is " + ("set" if triton_noise.INTERPRETED else "not set")
    return None
