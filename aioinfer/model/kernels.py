"""The one place that chooses kernels: for attention, layers and experts, by device, types and sizes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Literal

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.adapters.slots import TorchAdapters
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.pool import KVPool, KVShape
from aioinfer.model.attention.sdpa import SDPAAttention
from aioinfer.model.backend import Backend, choose_backend
from aioinfer.model.float8_linear import Float8Layers, scaled_unsupported
from aioinfer.model.layer_kernels import ExpertKernels, LayerKernels
from aioinfer.model.linear import TorchLinear, packed_or_torch
from aioinfer.model.moe.experts import Experts, ExpertWeights, GroupedExperts, LoopExperts, grouped_mm
from aioinfer.model.moe.float8_experts import float8_experts
from aioinfer.model.moe.routing import Router, Rule
from aioinfer.model.moe.sparse import StoredExperts
from aioinfer.model.operations.base import Operations
from aioinfer.model.operations.torch_operations import TorchOperations
from aioinfer.model.quantization import FLOAT8, Quantization
from aioinfer.model.spec import Progress
from aioinfer.model.torch_layers import TorchLayers
from aioinfer.model.triton_support import dtype_unsupported, triton_unsupported
from aioinfer.model.weights_cache import Blobs

__all__ = [
    *("AttentionBackend", "KVDtype", "MoEBackend"),
    *("check_cache_weights", "check_float8", "check_kv_dtype", "check_quantization", "choose_attention"),
    *("choose_experts", "choose_layers", "make_adapters", "make_attention", "make_experts", "make_layers"),
    *("make_operations", "make_router", "one_way", "why_variant"),
]

#: values of the option ``attention_backend``
AttentionBackend = Literal["auto", "triton", "flashinfer", "native", "sdpa"]
#: values of the option ``kv_dtype``: auto is the model's type
KVDtype = Literal["auto", "fp8"]
#: values of the option ``moe_backend``
MoEBackend = Literal["auto", "triton", "native", "grouped", "loop"]

#: backends that "auto" tries, by device type
_ATTENTION = {"cuda": ("triton", "sdpa"), "cpu": ("native", "sdpa")}
_EXPERTS = {"cuda": ("triton", "grouped", "loop"), "cpu": ("native", "grouped", "loop")}
_LARGEST_HEAD = 256
#: native kernels compute this many elements of a head, and multiply this many inner dimensions, at a time
_NATIVE_MULTIPLE = 16
#: torch's grouped multiplication asks for rows that begin at multiples of this many bytes
_GROUPED_ALIGNMENT = 16


def choose_attention(
    device: torch.device,
    head_dims: Collection[int],
    dtype: torch.dtype,
    wanted: AttentionBackend = "auto",
    progress: Progress | None = None,
    *,
    canvas: bool = False,
    latent: Sequence[int] = (),
) -> Backend:
    """The backend of attention: "triton", "flashinfer" (FlashInfer for prefill rows, Triton for the rest),
    "native" or "sdpa" (torch's own kernels).

    "auto" is Triton on a CUDA device for which it compiles, native kernels on a CPU where a compiler is
    found, else "sdpa", which models with a ``canvas`` always have. ``head_dims``: sizes of the heads of all
    layers. ``progress`` reports the compilation of native kernels. ``latent``: see
    :attr:`~aioinfer.model.spec.ModelSpec.latent`: latents are attended to by native decoders or by torch.

    Raises ConfigError if ``wanted`` cannot run. Triton runs on a CPU in its interpreter only, about a
    thousand times slower: for tests.
    """
    reasons = {
        "triton": lambda: _triton_unsupported(device, head_dims, dtype),
        "flashinfer": lambda: _flashinfer_unsupported(device, head_dims, dtype),
        "native": lambda: _native_unsupported(device, head_dims, dtype, progress),
    }
    if latent:
        reasons |= dict.fromkeys(("triton", "flashinfer"), lambda: "there is no kernel over latents")
        odd = [size for size in latent if size % _NATIVE_MULTIPLE]
        if odd:
            reasons["native"] = lambda: f"inner dimensions of {odd[0]} are no multiple of {_NATIVE_MULTIPLE}"
    if canvas:
        reasons = dict.fromkeys(reasons, lambda: "canvases are computed by torch's operations")
    return choose_backend(
        "attention_backend",
        wanted,
        {**reasons, "sdpa": lambda: None},
        _ATTENTION.get(device.type, ("sdpa",)),
        device,
    )


def one_way(attention: Backend) -> str:
    """Reason why the positions of an image cannot see each other both ways; empty if they can."""
    if attention.name in ("native", "sdpa"):
        return ""
    return f"attention by {attention.name} cannot see them both ways (attention_backend sdpa can)"


def choose_layers(attention: Backend, sizes: Sequence[int]) -> Backend:
    """The backend of layers whose matrix products have the inner dimensions ``sizes``. It is that of
    attention, unless that is native and a size is no multiple of 16: then torch computes everything but
    attention; or FlashInfer, which computes nothing else: Triton does."""
    if attention.name == "flashinfer":
        return Backend("triton", f"attention is by FlashInfer: {attention.reason}")
    if attention.name == "native" and any(size % _NATIVE_MULTIPLE for size in sizes):
        return Backend("sdpa", f"inner dimensions are no multiples of {_NATIVE_MULTIPLE}")
    return attention


def choose_experts(
    device: torch.device,
    hidden: int,
    middle: int,
    dtype: torch.dtype,
    wanted: MoEBackend = "auto",
    *,
    native: bool = False,
) -> Backend:
    """The backend of experts: "triton", "native", "grouped" (torch's grouped multiplication) or "loop" (one
    expert after the other).

    "auto" is Triton on a CUDA device for which it compiles, native kernels where the layers are native, else
    "grouped" where torch supports it, else "loop".

    Args:
        device: the device that holds the experts.
        hidden: size of the residual.
        middle: inner size of one expert.
        dtype: type of the weights.
        wanted: value of ``moe_backend``.
        native: the layers of the model are native.

    Raises:
        ConfigError: if ``wanted`` cannot run. Triton runs on a CPU in its interpreter only, for tests.
    """
    return choose_backend(
        "moe_backend",
        wanted,
        {
            "triton": lambda: dtype_unsupported(dtype) or triton_unsupported(device),
            "native": lambda: None if native else "the layers are not native",
            "grouped": lambda: _grouped_unsupported(device, hidden, middle, dtype),
            "loop": lambda: None,
        },
        _EXPERTS.get(device.type, ("grouped", "loop")),
        device,
    )


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
    """Compiles the kernels if nothing else is missing."""
    from aioinfer.native.bindings import native_unsupported

    if device.type != "cpu":
        return "the device is no CPU"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"there are no native kernels for {str(dtype).removeprefix('torch.')}"
    odd = [size for size in head_dims if size % _NATIVE_MULTIPLE]
    if odd:
        return f"heads of size {odd[0]} are no multiple of {_NATIVE_MULTIPLE}"
    return native_unsupported(progress and partial(progress, "kernels"))


def _grouped_unsupported(device: torch.device, hidden: int, middle: int, dtype: torch.dtype) -> str | None:
    """Calls torch's grouped multiplication on a small problem: the dtypes and devices that it supports differ
    between versions of torch."""
    step = _GROUPED_ALIGNMENT // dtype.itemsize
    if hidden % step or middle % step:
        return f"sizes {hidden} and {middle} are no multiples of {step}"
    rows = torch.zeros(2, 64, dtype=dtype, device=device)
    ends = torch.ones(1, dtype=torch.int32, device=device)
    try:
        grouped_mm(rows, rows.new_zeros(1, 64, 64).mT, ends)
    except RuntimeError as error:
        return f"torch says: {str(error).splitlines()[0]}"
    return None


def check_quantization(
    quantization: Quantization, layers: Backend | None, architecture: str, experts: Backend | None = None
) -> None:
    """Raise ConfigError if ``quantization`` is asked for and a backend cannot do it.

    Args:
        layers: the backend of the layers; None for a model of transformers.
        experts: that of a mixture of experts; None if there are none.
    """
    if quantization in ("auto", "none"):
        return
    if layers is None:
        raise ConfigError(f"quantization: the code of {architecture} is transformers' own")
    kernels = "triton" if quantization in FLOAT8 else "native"
    for what, backend in (("layers", layers), ("experts", experts)):
        if backend is not None and backend.name != kernels:
            found = f"these are {'torch' if backend.name == 'sdpa' else backend.name}: {backend.reason}"
            wanted = f"{what} by Triton" if kernels == "triton" else f"native {what}"
            raise ConfigError(f"quantization: {quantization} needs {wanted}, {found}")


def check_float8(
    quantization: Quantization, device: torch.device, dtype: torch.dtype, *, invariant: bool = False
) -> None:
    """Raise ConfigError if layers are to be rounded and their products may not be ``invariant`` as they
    should, or activations are and the device cannot multiply them."""
    if invariant and quantization in FLOAT8:
        raise ConfigError(f"deterministic: products of {quantization} add in tiles that fit the batch")
    if quantization == "fp8-dynamic":
        reason = scaled_unsupported(device, dtype)
        if reason is not None:
            raise ConfigError(f"quantization: fp8-dynamic was asked for, and {reason}")


def check_cache_weights(layers: Backend | None, load_format: str, architecture: str) -> None:
    """Raise ConfigError if a model has no packed weights that could be cached.

    Args:
        layers: the backend of the layers; None for a model of transformers.
    """
    if layers is None:
        raise ConfigError(f"cache_weights: the code of {architecture} is transformers' own")
    if load_format == "random":
        raise ConfigError("cache_weights: random weights are not cached")
    if layers.name != "native":
        raise ConfigError(f"cache_weights: these layers are {layers.name}, without packed weights")


def check_kv_dtype(kv_dtype: KVDtype, backend: Backend) -> None:
    """Raise ConfigError if a backend of attention cannot compute with such keys and values."""
    if kv_dtype != "auto" and backend.name != "triton":
        raise ConfigError(
            f"kv_dtype: {kv_dtype} needs attention by Triton, this is {backend.name}: {backend.reason}"
        )


def why_variant(architecture: str, attention: str, variance: str = "") -> str:
    """Reason why the logits of a model may depend on the batch, for error messages.

    Args:
       attention: the name of its attention backend.
       variance: the part that :func:`~aioinfer.model.invariance.variant_part` found, if it looked.
    """
    if attention == "native":
        return f"not all of {architecture} is computed by native kernels"
    if attention == "triton":
        found = variance or "transformers' code"
        return f"of {architecture}, {found} may add in an order that depends on the batch"
    return (
        f"the bits that {attention} kernels compute depend on the batch; those of native kernels on a CPU "
        "and of Triton's on CUDA do not"
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
        dtype: the type of the computation.
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


def make_layers(
    layers: Backend,
    experts: Backend | None,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization = "auto",
    blobs: Blobs | None = None,
    max_lora_rank: int = 0,
    *,
    invariant: bool = False,
) -> LayerKernels:
    """The kernels of layers and experts.

    Args:
        experts: the backend of experts; None in a model without.
        blobs: the file of packed weights, for native kernels.
        max_lora_rank: the largest rank of adapters; 0: the layers are not adapted.
        invariant: products by Triton add in one order for any batch. Native kernels always do.
    """
    if layers.name == "native":
        from aioinfer.model.native_layers import NativeLayers
        from aioinfer.native.bindings import shared_thread_pool

        pool = shared_thread_pool(torch.get_num_threads())
        other = None if experts is None or experts.name == "native" else _expert_kernels(experts)
        return NativeLayers(pool, dtype, quantization, blobs, max_lora_rank, other)
    by_triton = layers.name == "triton"
    adapters = make_adapters(dtype, device, max_lora_rank, triton=by_triton)
    float8 = None
    make_linear = TorchLinear if by_triton else packed_or_torch(device, dtype)
    if by_triton and invariant:
        from aioinfer.model.triton_linear import TritonLinear

        make_linear = TritonLinear
    elif by_triton and quantization in ("auto", *FLOAT8):
        float8 = Float8Layers(quantization, device)
    invariant = invariant and by_triton
    made = None if experts is None else _expert_kernels(experts, float8, invariant=invariant)
    return TorchLayers(make_operations(layers), make_linear, made, adapters, float8, invariant=invariant)


def make_tower_layers(dtype: torch.dtype, blobs: Blobs | None, *, native: bool) -> LayerKernels:
    """The kernels of an image encoder, whose rows are many: native ones or plain torch. Its weights stay as
    they are stored, whatever the option ``quantization`` makes of those of the text model."""
    if native:
        from aioinfer.model.native_layers import NativeLayers
        from aioinfer.native.bindings import shared_thread_pool

        return NativeLayers(shared_thread_pool(torch.get_num_threads()), dtype, "auto", blobs)
    return TorchLayers(TorchOperations(), TorchLinear, None)


def make_operations(layers: Backend) -> Operations:
    """The operations that go with the backend of layers."""
    if layers.name != "triton":
        return TorchOperations()
    from aioinfer.model.operations.triton_operations import TritonOperations

    return TritonOperations()


def make_adapters(
    dtype: torch.dtype, device: torch.device, max_rank: int, *, triton: bool
) -> TorchAdapters | None:
    """The adapters of layers that are not native; None if ``max_rank`` is 0."""
    if max_rank == 0:
        return None
    if triton:
        from aioinfer.model.adapters.triton_adapters import TritonAdapters

        return TritonAdapters(dtype, device, max_rank)
    return TorchAdapters(dtype, device, max_rank)


def make_experts(stack: ExpertWeights, backend: Backend, *, invariant: bool = False) -> Experts:
    """The experts of one layer by ``backend``, any but "native". ``invariant``: if Triton computes them, a
    token has the same bits in any batch."""
    if backend.name == "loop":
        return LoopExperts(stack)
    if backend.name == "grouped" or stack.plain:
        return GroupedExperts(stack)
    from aioinfer.model.moe.triton_experts import TritonExperts

    return TritonExperts(stack, invariant=invariant)


def make_router(rule: Rule, backend: Backend) -> Router:
    """The router of ``rule``: in Triton where ``backend`` is Triton and its kernel supports the rule."""
    if backend.name != "triton":
        return rule
    from aioinfer.model.moe.triton_routing import TritonRouter

    return rule if TritonRouter.unsupported_reason(rule) else TritonRouter(rule)


def _expert_kernels(
    backend: Backend, float8: Float8Layers | None = None, *, invariant: bool = False
) -> ExpertKernels:
    def experts(stored: StoredExperts) -> Experts:
        made = float8_experts(float8, stored) if float8 is not None and backend.name == "triton" else None
        return made or make_experts(stored.stacked(), backend, invariant=invariant)

    return ExpertKernels(partial(make_router, backend=backend), experts)
