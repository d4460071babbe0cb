"""LayerKernels: makes the linear layers, feed-forward parts and decoder of a model for one backend."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.adapters.slots import TorchAdapters, make_adapters
from aioinfer.model.attention.backend import make_operations
from aioinfer.model.backend import Backend
from aioinfer.model.decoder import Decoder, Layer
from aioinfer.model.float8 import Float8Layers
from aioinfer.model.gates import Gate
from aioinfer.model.linear import Linear, MakeLinear, TorchLinear, packed_or_torch
from aioinfer.model.mlp import FeedForward, GatedMLP, PlainMLP
from aioinfer.model.moe.backend import make_router, make_sparse
from aioinfer.model.moe.float8_experts import make_float8_experts
from aioinfer.model.moe.routing import Rule
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.operations.base import Operations
from aioinfer.model.quantization import FLOAT8, Quantization
from aioinfer.model.spec import CausalLM, ModelSpec
from aioinfer.model.weights import StoredMatrix
from aioinfer.model.weights_cache import Blobs

__all__ = [
    "LayerKernels",
    "TorchLayers",
    "check_cache_weights",
    "check_float8",
    "check_quantization",
    "choose_layers",
    "make_layers",
    "why_variant",
]

#: native kernels multiply this many inner dimensions at a time
_NATIVE_MULTIPLE = 16


class LayerKernels(Protocol):
    """Makes the parts of a model. It need not read weights that it has already."""

    @property
    def native(self) -> bool:
        """Whether the layers are computed by native kernels, which can compute experts, too."""

    @property
    def kept_bits(self) -> Collection[int]:
        """Of the weights that were quantised in the checkpoint and have stayed so, in what has been made."""

    @property
    def operations(self) -> Operations:
        """The operations between matrix products, for a decoder that calls them one by one."""

    def linear(self, stored: StoredMatrix, *, exact: bool = False) -> Linear:
        """A linear layer from a weight [outputs, inner]; ``exact``: it is not to be rounded."""

    def gated_mlp(
        self, gate_up: StoredMatrix, down: StoredMatrix, gate: Gate, *, shared: bool = False
    ) -> FeedForward:
        """A dense feed-forward part, from ``gate_up`` [2 * middle, hidden], the rows of gate first, and
        ``down`` [hidden, middle]; ``shared``: it is the shared expert of a mixture."""

    def plain_mlp(self, up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        """A dense feed-forward part, from ``up`` [middle, hidden] and ``down`` [hidden, middle]."""

    def sparse(
        self, rule: Rule, stored: StoredExperts, shared: FeedForward | None, backend: Backend
    ) -> FeedForward:
        """The feed-forward part of a mixture of experts. Raises ConfigError if a tensor is missing.

        Args:
            rule: the rule by which tokens are routed to experts.
            stored: the experts in the checkpoint.
            shared: experts that compute every token, or None.
            backend: the backend of the experts.
        """

    def decoder(
        self,
        spec: ModelSpec,
        layers: Sequence[Layer],
        *,
        words: StoredMatrix,
        head: StoredMatrix,
        **parts: Any,
    ) -> CausalLM:
        """The model.

        Args:
            words: [vocab_size, hidden], the vectors of tokens.
            head: the weight of the linear layer to logits, of the same shape; the same object if it is tied.
            parts: the other arguments of :class:`~aioinfer.model.decoder.Decoder`.
        """


@dataclass(frozen=True, slots=True)
class TorchLayers:
    """:class:`LayerKernels` by torch's matrix products, with operations between them in torch or Triton."""

    operations: Operations
    make_linear: MakeLinear
    #: of the layers that are made; None: they are not adapted
    adapters: TorchAdapters | None = None
    #: makes layers of floats of 8 bits; None: there are none
    float8: Float8Layers | None = None
    #: ``make_linear`` and the operations add in one order, whatever the batch is, and so shall the rest
    invariant: bool = False
    native = False

    @property
    def kept_bits(self) -> Collection[int]:
        return () if self.float8 is None else self.float8.kept_bits

    def linear(self, stored: StoredMatrix, *, exact: bool = False) -> Linear:
        made = None if exact or self.float8 is None else self.float8.linear(stored)
        if made is None:
            made = self.make_linear(stored.load(), stored.bias())
        return made if self.adapters is None else self.adapters.linear(stored, made)

    def gated_mlp(
        self, gate_up: StoredMatrix, down: StoredMatrix, gate: Gate, *, shared: bool = False
    ) -> FeedForward:
        return GatedMLP(self.linear(gate_up), self.linear(down), gate, self.operations)

    def plain_mlp(self, up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        return PlainMLP(self.linear(up), self.linear(down), gate)

    def sparse(
        self, rule: Rule, stored: StoredExperts, shared: FeedForward | None, backend: Backend
    ) -> FeedForward:
        made = None if self.float8 is None else make_float8_experts(self.float8, stored, backend)
        if made is None:
            return make_sparse(rule, stored, shared, backend, invariant=self.invariant)
        return SparseMLP(make_router(rule, backend), made, shared)

    def decoder(
        self,
        spec: ModelSpec,
        layers: Sequence[Layer],
        *,
        words: StoredMatrix,
        head: StoredMatrix,
        **parts: Any,
    ) -> CausalLM:
        vectors = words.view()
        to_logits = self.make_linear(vectors if head is words else head.view(), None)
        variance = "products of layers"
        if self.invariant:
            from aioinfer.model.invariance import variant_part

            variance = variant_part(layers, parts["embedding"], parts["norm"])
        return Decoder(
            spec,
            layers,
            words=vectors,
            head=to_logits,
            operations=self.operations,
            adapters=self.adapters,
            adapter_reason="max_lora_rank is 0",
            variance=variance,
            **parts,
        )


def choose_layers(backend: Backend, sizes: Sequence[int]) -> Backend:
    """The backend of layers whose matrix products have the inner dimensions ``sizes``; ``backend`` is that of
    attention. They are the same, unless it is native and a size is no multiple of 16: then torch computes
    everything but attention; or FlashInfer, which computes nothing else: Triton does."""
    if backend.name == "flashinfer":
        return Backend("triton", f"attention is by FlashInfer: {backend.reason}")
    if backend.name == "native" and any(size % _NATIVE_MULTIPLE for size in sizes):
        return Backend("sdpa", f"inner dimensions are no multiples of {_NATIVE_MULTIPLE}")
    return backend


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
        from aioinfer.model.float8 import scaled_unsupported

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


def why_variant(architecture: str, attention: str, variance: str = "") -> str:
    """Why the logits of a model may depend on the batch, for error messages.

    Args:
        attention: the name of its attention backend.
        variance: what :func:`~aioinfer.model.invariance.variant_part` found in the model, if it looked.
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


def make_layers(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[int] = (),
    quantization: Quantization = "auto",
    blobs: Blobs | None = None,
    max_lora_rank: int = 0,
    *,
    invariant: bool = False,
) -> LayerKernels:
    """The layers' kernels for an attention backend.

    Args:
        sizes: the inner dimensions of the layers.
        blobs: of packed weights, for native kernels.
        max_lora_rank: of adapters; 0: the layers are not adapted.
        invariant: if Triton computes the attention, products add in one order whatever the batch is. Native
            kernels always do.
    """
    backend = choose_layers(backend, sizes)
    if backend.name == "native":
        from aioinfer.model.native_layers import NativeLayers
        from aioinfer.native.bindings import shared_thread_pool

        pool = shared_thread_pool(torch.get_num_threads())
        return NativeLayers(pool, quantization, blobs, max_lora_rank)
    adapters = make_adapters(dtype, device, max_lora_rank, triton=backend.name == "triton")
    operations = make_operations(backend)
    if backend.name != "triton":
        return TorchLayers(operations, packed_or_torch(device, dtype), adapters)
    check_float8(quantization, device, dtype, invariant=invariant)
    if invariant:
        from aioinfer.model.triton_linear import TritonLinear

        return TorchLayers(operations, TritonLinear, adapters, invariant=True)
    float8 = Float8Layers(quantization, device) if quantization in ("auto", *FLOAT8) else None
    # A captured CUDA graph reads weights in place: not packed.
    return TorchLayers(operations, TorchLinear, adapters, float8)
