"""Whether Triton kernels can run on a device and in a dtype."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from aioinfer.model.triton_build import build_unsupported

__all__ = [
    *("compute_capability", "dtype_unsupported", "interpreted", "launches_early", "shared_memory"),
    "triton_unsupported",
]

#: the least compute capability: the first tensor cores with bfloat16 (Ampere)
_CAPABILITY = (8, 0)
_HOPPER = (9, 0)
#: KiB of shared memory of a program, by compute capability; all others have, or may have, the last
_SHARED_KIB = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED_KIB = 99
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@cache
def interpreted() -> bool:
    """Whether Triton kernels of this process run in Triton's interpreter, on CPU tensors, instead of being
    compiled. The environment variable TRITON_INTERPRET decides it when triton is imported."""
    import triton

    return not isinstance(triton.jit(interpreted.__wrapped__), triton.JITFunction)


def triton_unsupported(device: torch.device) -> str | None:
    """Reason why Triton kernels cannot run on ``device``, in words for the user; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _CAPABILITY:
        return "the device is older than compute capability {}.{}".format(*_CAPABILITY)
    if (device.type == "cuda") == interpreted():
        return "TRITON_INTERPRET is " + ("set" if interpreted() else "not set, without which it needs CUDA")
    return build_unsupported() if device.type == "cuda" else None


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device; (9, 0), Hopper's, of a CPU, where kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


@cache
def launches_early(device: torch.device) -> bool:
    """Whether kernels are launched there while those before still run: on Hopper, where it was tried; see
    :func:`~aioinfer.model.attention.triton_common.follow`."""
    return device.type == "cuda" and not interpreted() and compute_capability(device) == _HOPPER


def shared_memory(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a program can have: the figures for compute capabilities in CUDA's
    programming guide, and the least of them for one that is not known."""
    return _SHARED_KIB.get(capability, _LEAST_SHARED_KIB) << 10


def dtype_unsupported(dtype: torch.dtype) -> str | None:
    """Reason why Triton kernels that multiply matrices cannot run in ``dtype``; None if they can."""
    return None if dtype in _DTYPES else f"there are no kernels for {str(dtype).removeprefix('torch.')}"
