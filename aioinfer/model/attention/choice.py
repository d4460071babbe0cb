"""Which kernels a device gets, for attention and for what a layer computes besides, and why. The one place
where that is decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from aioinfer.errors import ConfigError
from aioinfer.kernels import triton_obstacle
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.pool import KVPool
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.operations.base import Operations
from aioinfer.model.operations.torch_operations import TorchOperations

__all__ = ["Choice", "choose_attention", "make_attention", "make_operations", "type_obstacle"]

_LARGEST_HEAD = 256
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels that run, and the reason in words for people."""

    kernels: Literal["triton", "sdpa"]
    reason: str


def choose_attention(
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
    wanted: Literal["auto", "triton", "sdpa"] = "auto",
) -> Choice:
    """``auto`` is Triton on a CUDA device that it compiles for, else torch's own kernels.

    Raises ConfigError if Triton is wanted where it cannot run. On a CPU it can if its interpreter was
    chosen, which is for tests: it is about a thousand times slower.
    """
    if wanted == "sdpa":
        return Choice("sdpa", "asked for")
    if wanted == "auto" and device.type != "cuda":
        return Choice("sdpa", f"the device is a {device.type}")
    obstacle = _obstacle(device, head_dim, dtype)
    if obstacle is None:
        return Choice("triton", "asked for" if wanted == "triton" else "the device is CUDA")
    if wanted == "triton":
        raise ConfigError(f"attention: triton was asked for, and {obstacle}")
    return Choice("sdpa", obstacle)


def make_attention(pool: KVPool, choice: Choice) -> Attention:
    """The kernels of ``choice`` over ``pool``."""
    if choice.kernels == "sdpa":
        return SDPAAttention(pool)
    from aioinfer.model.attention.triton_attention import TritonAttention

    return TritonAttention(pool)


def make_operations(choice: Choice) -> Operations:
    """The operations that go with ``choice``."""
    if choice.kernels == "sdpa":
        return TorchOperations()
    from aioinfer.model.operations.triton_operations import TritonOperations

    return TritonOperations()


def _obstacle(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """What keeps Triton's attention kernels from running there, if anything does."""
    if head_dim > _LARGEST_HEAD:
        return f"heads of size {head_dim} are larger than {_LARGEST_HEAD}"
    return type_obstacle(dtype) or triton_obstacle(device)


def type_obstacle(dtype: torch.dtype) -> str | None:
    """What keeps kernels that multiply matrices from running in a type, if anything does."""
    return None if dtype in _TYPES else f"there are no kernels for {str(dtype).removeprefix('torch.')}"
