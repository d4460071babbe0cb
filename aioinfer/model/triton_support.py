"""Whether kernels in Triton can run on a device: asked wherever there is a choice between them and torch."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

__all__ = ["interpreted", "triton_unsupported"]

#: what tensor cores with bfloat16 came with (Ampere)
_CAPABILITY = (8, 0)


@cache
def interpreted() -> bool:
    """Whether kernels of this process run in Triton's interpreter, on CPU tensors, instead of being compiled.

    Settled when triton is imported, by TRITON_INTERPRET.
    """
    import triton

    return not isinstance(triton.jit(interpreted.__wrapped__), triton.JITFunction)


def triton_unsupported(device: torch.device) -> str | None:
    """What keeps our kernels from running there, in words for people; None if nothing does."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        return "the device is older than compute capability {}.{}".format(*_CAPABILITY)
    if (device.type == "cuda") == interpreted():
        return "TRITON_INTERPRET is " + ("set" if interpreted() else "not set, without which it needs CUDA")
    return None
