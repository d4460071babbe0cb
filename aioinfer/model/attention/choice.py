"""Which kernels a device gets, for attention and for what a layer computes besides, and why. The one place
where that is decided."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.pool import KVPool
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.operations.base import Operations
from aioinfer.model.operations.torch_operations import TorchOperations
from aioinfer.model.spec import Progress
from aioinfer.model.triton_support import triton_unsupported

__all__ = ["Choice", "Kernels", "choose_attention", "dtype_unsupported", "make_attention", "make_operations"]

#: who computes the layers of a model
Kernels = Literal["triton", "native", "sdpa"]

_LARGEST_HEAD = 256
#: dimensions of a head that native kernels compute at a time
_HEAD_MULTIPLE = 16
_TYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernels that run, and the reason in words for people."""

    kernels: Kernels
    reason: str


def choose_attention(
    device: torch.device,
    head_dim: int,
    dtype: torch.dtype,
    wanted: Literal["auto"] | Kernels = "auto",
    progress: Progress | None = None,
) -> Choice:
    """``auto`` is Triton on a CUDA device that it compiles for, native kernels on a CPU where there is a
    compiler for them, else torch's own kernels. ``progress`` hears of native kernels being compiled.

    Raises ConfigError if kernels are wanted where they cannot run. Triton can on a CPU if its interpreter was
    chosen, which is for tests: it is about a thousand times slower.
    """
    if wanted == "sdpa":
        return Choice("sdpa", "asked for")
    here: Kernels = "triton" if device.type == "cuda" else "native"
    if wanted == "auto" and device.type not in ("cuda", "cpu"):
        return Choice("sdpa", f"the device is a {device.type}")
    asked = here if wanted == "auto" else wanted
    if asked == "triton":
        unsupported_reason = _triton_unsupported(device, head_dim, dtype)
    else:
        unsupported_reason = _native_unsupported(device, head_dim, dtype, progress)
    if unsupported_reason is None:
        why = "the device is CUDA" if device.type == "cuda" else f"the device is a {device.type}"
        return Choice(asked, why if wanted == "auto" else "asked for")
    if wanted != "auto":
        raise ConfigError(f"attention: {wanted} was asked for, and {unsupported_reason}")
    return Choice("sdpa", unsupported_reason)


def make_attention(
    choice: Choice,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Attention:
    """The kernels of ``choice`` over a new pool, sized as :class:`~aioinfer.model.attention.pool.KVPool`."""
    sizes = {"num_layers": num_layers, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    sizes |= {"num_pages": num_pages, "page_size": page_size}
    if choice.kernels == "native":
        from aioinfer.model.attention.native_attention import NativeAttention
        from aioinfer.native.bindings import shared_thread_pool

        return NativeAttention(shared_thread_pool(torch.get_num_threads()), dtype=dtype, **sizes)
    pool = KVPool(dtype=dtype, device=device, **sizes)
    if choice.kernels == "sdpa":
        return SDPAAttention(pool)
    from aioinfer.model.attention.triton_attention import TritonAttention

    return TritonAttention(pool)


def make_operations(choice: Choice) -> Operations:
    """The operations that go with ``choice``."""
    if choice.kernels != "triton":
        return TorchOperations()
    from aioinfer.model.operations.triton_operations import TritonOperations

    return TritonOperations()


def _triton_unsupported(device: torch.device, head_dim: int, dtype: torch.dtype) -> str | None:
    """What keeps Triton's attention kernels from running there, if anything does."""
    if head_dim > _LARGEST_HEAD:
        return f"heads of size {head_dim} are larger than {_LARGEST_HEAD}"
    return dtype_unsupported(dtype) or triton_unsupported(device)


def _native_unsupported(
    device: torch.device, head_dim: int, dtype: torch.dtype, progress: Progress | None
) -> str | None:
    """What keeps native kernels from running there, if anything does. Compiles them."""
    from aioinfer.native.bindings import native_unsupported

    if device.type != "cpu":
        return "the device is no CPU"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"there are no native kernels for {str(dtype).removeprefix('torch.')}"
    if head_dim % _HEAD_MULTIPLE:
        return f"heads of size {head_dim} are no multiple of {_HEAD_MULTIPLE}"
    return native_unsupported(progress and partial(progress, "kernels"))


def dtype_unsupported(dtype: torch.dtype) -> str | None:
    """What keeps kernels that multiply matrices from running in a type, if anything does."""
    return None if dtype in _TYPES else f"there are no kernels for {str(dtype).removeprefix('torch.')}"
