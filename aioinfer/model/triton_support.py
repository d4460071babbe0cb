"""Whether Triton kernels can run on a device and in a dtype."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from aioinfer.model.triton_build import build_unsupported

__all__ = ["dtype_unsupported", "interpreted", "triton_unsupported"]

#: the least compute capability: the first tensor cores with bfloat16 (Ampere)
_CAPABILITY = (8, 0)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def interpreted() -> bool:
    """Whether Triton kernels of this process run in Triton's interpreter, on CPU tensors, instead of being
    compiled. The environment variable TRITON_INTERPRET decides it when triton is imported."""
    import triton

    return not isinstance(triton.jit(interpreted.__wrapped__), triton.JITFunction)


def triton_unsupported(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on ``device``, in words for the user; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        return "the device is older than compute capability {}.{}".format(*_CAPABILITY)
    if (device.type == "cuda") == interpreted():
        return "TRITON_INTERPRET is " + ("set" if interpreted() else "not set, without which it needs CUDA")
    return build_unsupported() if device.type == "cuda" else None


def dtype_unsupported(dtype: torch.dtype) -> str | None:
    """Why Triton kernels that multiply matrices cannot run in ``dtype``; None if they can."""
    return None if dtype in _DTYPES else f"there are no kernels for {str(dtype).removeprefix('torch.')}"
