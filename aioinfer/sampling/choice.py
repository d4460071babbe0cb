"""Which code samples on a device, and why. The one place where that is decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.triton_support import triton_unsupported

__all__ = ["Kernels", "SamplingChoice", "choose_sampling"]


#: who samples
Kernels = Literal["triton", "native", "torch"]


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """The code that runs, and the reason in words for people."""

    kernels: Kernels
    reason: str


def choose_sampling(device: torch.device, wanted: Literal["auto"] | Kernels = "auto") -> SamplingChoice:
    """``auto`` is Triton on a CUDA device that it compiles for, native kernels on a CPU where there is a
    compiler for them, else torch's operations. All draw the same tokens.

    Raises ConfigError if kernels are wanted where they cannot run. Triton can on a CPU if its interpreter was
    chosen, which is for tests.
    """
    if wanted == "torch":
        return SamplingChoice("torch", "asked for")
    if wanted == "auto" and device.type not in ("cuda", "cpu"):
        return SamplingChoice("torch", f"the device is a {device.type}")
    here: Kernels = "triton" if device.type == "cuda" else "native"
    asked = here if wanted == "auto" else wanted
    unsupported_reason = triton_unsupported(device) if asked == "triton" else _native_unsupported(device)
    if unsupported_reason is None:
        why = "the device is CUDA" if device.type == "cuda" else f"the device is a {device.type}"
        return SamplingChoice(asked, why if wanted == "auto" else "asked for")
    if wanted != "auto":
        raise ConfigError(f"sampling: {wanted} was asked for, and {unsupported_reason}")
    return SamplingChoice("torch", unsupported_reason)


def _native_unsupported(device: torch.device) -> str | None:
    """What keeps native kernels from running there, if anything does. Compiles them."""
    from aioinfer.native.bindings import native_unsupported

    return native_unsupported() if device.type == "cpu" else "the device is no CPU"
