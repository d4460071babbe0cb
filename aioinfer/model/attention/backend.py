"""The backends of attention, and of the operations between matrix products that go with each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.backend import Backend, choose_backend
from aioinfer.model.operations.base import Operations
from aioinfer.model.operations.torch_operations import TorchOperations
from aioinfer.model.spec import Progress
from aioinfer.model.triton_support import dtype_unsupported, triton_unsupported

__all__ = [
    *("AttentionBackend", "KVDtype", "check_kv_dtype", "choose_attention"),
    *("make_attention", "make_operations"),
]

#: values of the option ``attention_backend``
AttentionBackend = Literal["auto", "triton", "flashinfer", "native", "sdpa"]
#: values of the option ``kv_dtype``: auto is the model's type
KVDtype = Literal["auto", "fp8"]

#: what "auto" tries, by device type
_AUTOMATIC = {"cuda": ("triton", "sdpa"), "cpu": ("native", "sdpa")}
_LARGEST_HEAD = 256
#: native kernels compute this many elements of a head at a time
_HEAD_MULTIPLE = 16


def choose_attention(
    device: torch.device,
    head_dims: Collection[int],
    dtype: torch.dtype,
    wanted: AttentionBackend = "auto",
    progress: Progress | None = None,
) -> Backend:
    """The backend of attention: "triton", "flashinfer" (FlashInfer for prefill rows, Triton for the rest),
    "native" or "sdpa" (torch's own kernels).

    "auto" is Triton on a CUDA device for which it compiles, native kernels on a CPU where a compiler is
    found, else "sdpa". ``head_dims``: sizes of the heads of all layers.
    ``progress`` reports the compilation of native kernels.

    Raises ConfigError if ``wanted`` cannot run. Triton runs on a CPU in its interpreter only, about a
    thousand times slower: for tests.
    """
    return choose_backend(
        "attention_backend",
        wanted,
        {
            "triton": lambda: _triton_unsupported(device, head_dims, dtype),
            "flashinfer": lambda: _flashinfer_unsupported(device, head_dims, dtype),
            "native": lambda: _native_unsupported(device, head_dims, dtype, progress),
            "sdpa": lambda: None,
        },
        _AUTOMATIC.get(device.type, ("sdpa",)),
        device,
    )


def make_attention(
    backend: Backend,
    layers: Sequence[KVShape],
    *,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: KVDtype = "auto",
    invariant: bool = False,
) -> Attention:
    """Attention by ``backend``, over a new KV pool for ``layers``, of ``num_pages`` pages and the null
    page. Raises ConfigError as :func:`check_kv_dtype`.

    Args:
        dtype: of what is computed with.
        invariant: Triton's gives a token the same bits in any batch, as the native one always does.
    """
    check_kv_dtype(kv_dtype, backend)
    sizes = {"num_pages": num_pages, "page_size": page_size}
    if backend.name == "native":
        from aioinfer.model.attention.native_attention import NativeAttention
        from aioinfer.native.bindings import shared_thread_pool

        return NativeAttention(shared_thread_pool(torch.get_num_threads()), layers, dtype=dtype, **sizes)
    pool = KVPool(layers, dtype=dtype, device=device, float8=kv_dtype == "fp8", **sizes)
    if backend.name == "sdpa":
        return SDPAAttention(pool)
    if backend.name == "flashinfer":
        from aioinfer.model.attention.flashinfer_attention import FlashInferAttention

        return FlashInferAttention(pool)
    from aioinfer.model.attention.triton_attention import TritonAttention

    return TritonAttention(pool, invariant=invariant)


def check_kv_dtype(kv_dtype: KVDtype, backend: Backend) -> None:
    """Raise ConfigError if a backend of attention cannot compute with such keys and values."""
    if kv_dtype != "auto" and backend.name != "triton":
        raise ConfigError(
            f"kv_dtype: {kv_dtype} needs attention by Triton, this is {backend.name}: {backend.reason}"
        )


def make_operations(backend: Backend) -> Operations:
    """The operations that go with the backend of layers."""
    if backend.name != "triton":
        return TorchOperations()
    from aioinfer.model.operations.triton_operations import TritonOperations

    return TritonOperations()


def _triton_unsupported(device: torch.device, head_dims: Collection[int], dtype: torch.dtype) -> str | None:
    if max(head_dims) > _LARGEST_HEAD:
        return f"heads of size {max(head_dims)} are larger than {_LARGEST_HEAD}"
    return dtype_unsupported(dtype) or triton_unsupported(device)


def _flashinfer_unsupported(
    device: torch.device, head_dims: Collection[int], dtype: torch.dtype
) -> str | None:
    reason = _triton_unsupported(device, head_dims, dtype)
    if reason is not None:
        return reason
    from aioinfer.model.attention.flashinfer_attention import flashinfer_unsupported

    return flashinfer_unsupported(frozenset(head_dims), dtype)


def _native_unsupported(
    device: torch.device, head_dims: Collection[int], dtype: torch.dtype, progress: Progress | None
) -> str | None:
    """Compiles the kernels if nothing else speaks against them."""
    from aioinfer.native.bindings import native_unsupported

    if device.type != "cpu":
        return "the device is no CPU"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"there are no native kernels for {str(dtype).removeprefix('torch.')}"
    odd = [size for size in head_dims if size % _HEAD_MULTIPLE]
    if odd:
        return f"heads of size {odd[0]} are no multiple of {_HEAD_MULTIPLE}"
    return native_unsupported(progress and partial(progress, "kernels"))
