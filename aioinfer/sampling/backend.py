"""The backends of sampling. All draw the same tokens."""

from __future__ import annotations

from typing import Literal

import torch

from aioinfer.model.backend import Backend, choose_backend
from aioinfer.model.triton_support import triton_unsupported

__all__ = ["SamplingBackend", "choose_proposing", "choose_sampling"]

#: values of the option ``sampling_backend``
SamplingBackend = Literal["auto", "triton", "native", "torch"]

#: what "auto" tries, by device type
_AUTOMATIC = {"cuda": ("triton", "torch"), "cpu": ("native", "torch")}


def choose_sampling(device: torch.device, wanted: SamplingBackend = "auto") -> Backend:
    """The backend of sampling: "triton", "native" or "torch".

    "auto" is Triton on a CUDA device for which it compiles, native kernels on a CPU where a compiler is
    found, else torch's operations.

    Raises ConfigError if ``wanted`` cannot run. Triton runs on a CPU in its interpreter only, for tests.
    """
    return choose_backend(
        "sampling_backend",
        wanted,
        {
            "triton": lambda: triton_unsupported(device),
            "native": lambda: _native_unsupported(device),
            "torch": lambda: None,
        },
        _AUTOMATIC.get(device.type, ("torch",)),
        device,
    )


def choose_proposing(device: torch.device, wanted: SamplingBackend = "auto") -> Backend:
    """The backend that proposes the tokens of diffusion models: "triton" or "torch".

    "auto" is Triton on a CUDA device for which it compiles, else torch's operations; native kernels do not
    propose, so on a CPU "native" is the same. Raises ConfigError as :func:`choose_sampling` does.
    """
    native = wanted == "native" and device.type == "cpu"
    return choose_backend(
        "sampling_backend",
        "auto" if native else wanted,
        {
            "triton": lambda: triton_unsupported(device),
            "native": lambda: "the device is no CPU",
            "torch": lambda: None,
        },
        ("triton", "torch") if device.type == "cuda" else ("torch",),
        device,
    )


def _native_unsupported(device: torch.device) -> str | None:
    """Compiles the kernels if the device is a CPU."""
    from aioinfer.native.bindings import native_unsupported

    return native_unsupported() if device.type == "cpu" else "the device is no CPU"
