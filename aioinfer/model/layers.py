"""LayerKernels: what the layers of a model are made of, by the kernels chosen for a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.backend import make_operations
from aioinfer.model.backend import Backend
from aioinfer.model.decoder import Decoder, Layer
from aioinfer.model.linear import Linear, MakeLinear, TorchLinear, packed_or_torch
from aioinfer.model.mlp import FeedForward, SwiGLU
from aioinfer.model.moe.backend import make_sparse
from aioinfer.model.moe.routing import Rule
from aioinfer.model.moe.sparse import StoredExperts
from aioinfer.model.operations.base import Operations
from aioinfer.model.spec import CausalLM, ModelSpec

__all__ = [
    "LayerKernels",
    "Quantization",
    "TorchLayers",
    "check_quantization",
    "choose_layers",
    "make_layers",
    "why_variant",
]

#: how the weights of linear layers are stored
Quantization = Literal["none", "int8"]
_NATIVE_MULTIPLE = 16


class LayerKernels(Protocol):
    """Makes the parts of a model that compute. What it is given, it may copy and drop."""

    @property
    def native(self) -> bool:
        """They are those in C++, which compute experts, too."""

    @property
    def operations(self) -> Operations:
        """What a layer computes between its products, where it does so one by one."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """From a weight [outputs, inner] and a bias [outputs]."""

    def swiglu(
        self,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
    ) -> FeedForward:
        """The dense feed-forward part, from [2 * middle, hidden], gates first, and [hidden, middle]."""

    def sparse(
        self, rule: Rule, stored: StoredExperts, shared: FeedForward | None, backend: Backend
    ) -> FeedForward:
        """The feed-forward part with experts: which of them a token goes to, they themselves, what all tokens
        pass besides, and who computes them."""

    def decoder(self, spec: ModelSpec, layers: Sequence[Layer], **parts: Any) -> CausalLM:
        """The model; ``parts`` as :class:`~aioinfer.model.decoder.Decoder` takes them."""


@dataclass(frozen=True, slots=True)
class TorchLayers:
    """See :class:`LayerKernels`: torch's products, and operations between them in torch or Triton."""

    operations: Operations
    make_linear: MakeLinear
    native = False

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return self.make_linear(weight, bias)

    def swiglu(
        self,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
    ) -> FeedForward:
        return SwiGLU(self.linear(gate_up, gate_up_bias), self.linear(down, down_bias), self.operations)

    def sparse(
        self, rule: Rule, stored: StoredExperts, shared: FeedForward | None, backend: Backend
    ) -> FeedForward:
        return make_sparse(rule, stored, shared, backend)

    def decoder(self, spec: ModelSpec, layers: Sequence[Layer], **parts: Any) -> CausalLM:
        return Decoder(spec, layers, operations=self.operations, **parts)


def choose_layers(backend: Backend, sizes: Sequence[int]) -> Backend:
    """Whose kernels layers of these inner dimensions get, and why, where attention gets those of ``choice``:
    the same, but that native ones compute 16 at a time. Where they cannot, torch does all but attention."""
    if backend.name == "native" and any(size % _NATIVE_MULTIPLE for size in sizes):
        return Backend("sdpa", f"inner dimensions are no multiples of {_NATIVE_MULTIPLE}")
    return backend


def check_quantization(layers: Backend | None, architecture: str, quantization: Quantization) -> None:
    """Raises ConfigError for weights that are to be quantised where nobody does it.

    ``layers`` is whose kernels they get, None if they are transformers'.
    """
    if quantization == "none" or (layers is not None and layers.name == "native"):
        return
    if layers is None:
        raise ConfigError(f"quantization: the code of {architecture} is transformers' own")
    raise ConfigError(
        f"quantization: {quantization} needs native layers, these are {layers.name}: {layers.reason}"
    )


def why_variant(architecture: str, attention: str) -> str:
    """Why a model that is not native throughout cannot promise results that depend on no company."""
    if attention != "native":
        return f"the bits that {attention} kernels compute depend on the batch; native ones' on a CPU do not"
    return f"not all of {architecture} is computed by native kernels"


def make_layers(
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sequence[int] = (),
    quantization: Quantization = "none",
) -> LayerKernels:
    """The kernels that go with those of attention. ``sizes``: inner dimensions of the layers."""
    if choose_layers(backend, sizes).name == "native":
        from aioinfer.model.native import NativeLayers
        from aioinfer.native.bindings import shared_thread_pool

        return NativeLayers(shared_thread_pool(torch.get_num_threads()), quantization)
    # What Triton's kernels are captured with reads weights where they lie.
    make_linear = TorchLinear if backend.name == "triton" else packed_or_torch(device, dtype)
    return TorchLayers(make_operations(backend), make_linear)
