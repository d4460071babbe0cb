"""Native: linear layers and whole decoders over the kernels in C++ (:mod:`aioinfer.native`), on a CPU.

Weights are packed when a model is built and their originals dropped. Every result is a function of its own
row: neither the batch, nor the threads, nor how a prompt was cut into chunks changes a bit of it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch

from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.native_attention import NativeAttention, scoring_numbers
from aioinfer.model.backend import Backend
from aioinfer.model.batch import Batch
from aioinfer.model.decoder import Decoder, Layer
from aioinfer.model.linear import Linear
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.backend import make_sparse
from aioinfer.model.moe.native_experts import NativeExperts, NativeRouter
from aioinfer.model.moe.routing import Rule
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.operations.torch_operations import TorchOperations
from aioinfer.model.rope import Rope
from aioinfer.model.spec import CausalLM, ModelSpec
from aioinfer.native.bindings import (
    PARTS,
    Number,
    PackedExperts,
    PackedRouter,
    PackedWeights,
    Stack,
    ThreadPool,
)

__all__ = ["NativeDecoder", "NativeLayers", "NativeLinear", "NativeSwiGLU"]

_NUMBERS: dict[torch.dtype, Number] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class NativeLinear:
    """See :class:`~aioinfer.model.linear.Linear`."""

    __slots__ = ("packed",)

    def __init__(
        self,
        team: ThreadPool,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        quantization: Literal["none", "int8"] = "none",
        *,
        gated: bool = False,
    ) -> None:
        """``weight`` [outputs, inner]; gated [2 * outputs, inner], and it computes ``silu(gate) * up``."""
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        rows, inner = weight.shape
        self.packed = PackedWeights(
            *(team, _NUMBERS[weight.dtype], weight.data_ptr()),
            None if bias is None else bias.data_ptr(),
            *(rows // 2 if gated else rows, inner),
            gated=gated,
            rounded=quantization == "int8",
        )

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        """See :class:`~aioinfer.model.linear.Linear`."""
        values = values.contiguous()
        out = values.new_empty((len(values), self.packed.outputs))
        self.packed.apply(values.data_ptr(), len(values), out.data_ptr())
        return out


class NativeSwiGLU:
    """See :class:`~aioinfer.model.mlp.FeedForward`; :class:`~aioinfer.model.mlp.SwiGLU` in two calls."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: NativeLinear, down: NativeLinear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """See :class:`~aioinfer.model.mlp.FeedForward`."""
        return self.down(self.gate_up(hidden))


class NativeDecoder:
    """A decoder whose layers are native throughout: one call computes a step, without the interpreter's lock.

    See :class:`~aioinfer.model.spec.CausalLM`; logits are float32 whatever the model's type. Its attention
    must be a :class:`~aioinfer.model.attention.native_attention.NativeAttention`.
    """

    capturable = False
    invariant = True

    def __init__(
        self,
        team: ThreadPool,
        spec: ModelSpec,
        layers: Sequence[Layer],
        *,
        embedding: torch.Tensor,
        norm: torch.Tensor,
        head: NativeLinear,
        eps: float,
        rope: Rope,
    ) -> None:
        """As :class:`~aioinfer.model.decoder.Decoder`; all parts of the layers are native."""
        self.spec = spec
        cos, sin = rope.table
        shape = spec.num_heads, spec.num_kv_heads, spec.head_dim
        head_norms = [None if layer.qk_norm is None else _own(layer.qk_norm.weight) for layer in layers]
        head_eps = next((layer.qk_norm.eps for layer in layers if layer.qk_norm is not None), 0.0)
        words, last = _own(embedding), _own(norm)
        #: what the kernels read where it lies
        self._kept = [words, last, cos, sin, *(weight for weight in head_norms if weight is not None)]
        self._stack = Stack(
            *(team, _NUMBERS[spec.dtype], head.packed, words.data_ptr(), last.data_ptr()),
            *(*shape, head_eps, cos.data_ptr(), sin.data_ptr(), cos.shape[-1]),
            *(spec.hidden_size, max(_middle(layer) for layer in layers), eps),
        )
        for layer, head_norm in zip(layers, head_norms, strict=True):
            self._add(layer, head_norm)
        self._seconds = (ctypes.c_double * len(PARTS))()

    def _add(self, layer: Layer, head_norm: torch.Tensor | None) -> None:
        assert isinstance(layer.qkv, NativeLinear)
        assert isinstance(layer.out, NativeLinear)
        parts = _parts(layer.mlp)
        assert parts is not None
        dense = (None, None) if parts.dense is None else (parts.dense.gate_up.packed, parts.dense.down.packed)
        norms = [_own(layer.attention_norm), _own(layer.mlp_norm)]
        self._kept += norms
        self._stack.add_layer(
            (norms[0].data_ptr(), None if head_norm is None else head_norm.data_ptr(), norms[1].data_ptr()),
            [layer.qkv.packed, layer.out.packed, *dense],
            parts.experts,
            scoring_numbers(layer.attention_params),
        )

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """See :class:`~aioinfer.model.spec.CausalLM`."""
        assert isinstance(attention, NativeAttention), "native layers go with native attention"
        logits = torch.empty(len(batch.logits_rows), self.spec.vocab_size)
        tables = batch.block_table
        self._stack.forward(
            *(attention.pools, attention.page_size, len(batch.input_ids), batch.input_ids.data_ptr()),
            *(batch.positions.data_ptr(), batch.slot_mapping.data_ptr(), len(batch.q_lens)),
            *(batch.cu_q.data_ptr(), batch.kv_len.data_ptr(), tables.data_ptr(), tables.shape[1]),
            *(len(logits), batch.logits_rows.data_ptr(), logits.data_ptr(), ctypes.addressof(self._seconds)),
        )
        return logits

    @property
    def seconds(self) -> dict[str, float]:
        """What each part of all forwards so far has taken."""
        return dict(zip(PARTS, self._seconds, strict=True))


class NativeLayers:
    """See :class:`~aioinfer.model.layers.LayerKernels`."""

    native = True

    def __init__(self, team: ThreadPool, quantization: Literal["none", "int8"] = "none") -> None:
        self._team, self._quantization = team, quantization
        self.operations = TorchOperations()

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        return NativeLinear(self._team, weight, bias, self._quantization)

    def swiglu(
        self,
        gate_up: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down: torch.Tensor,
        down_bias: torch.Tensor | None,
    ) -> FeedForward:
        return NativeSwiGLU(
            NativeLinear(self._team, gate_up, gate_up_bias, self._quantization, gated=True),
            NativeLinear(self._team, down, down_bias, self._quantization),
        )

    def sparse(
        self, rule: Rule, stored: StoredExperts, shared: FeedForward | None, backend: Backend
    ) -> FeedForward:
        if backend.name != "native":
            return make_sparse(rule, stored, shared, backend)
        dtype, sizes = stored.weights.dtype, (stored.num_experts, stored.hidden, stored.middle)
        rounded = self._quantization == "int8"
        experts = NativeExperts(self._team, dtype, sizes, stored.each(), rounded=rounded)
        return SparseMLP(NativeRouter(self._team, rule, dtype), experts, shared)

    def decoder(self, spec: ModelSpec, layers: Sequence[Layer], **parts: Any) -> CausalLM:
        if all(_parts(layer.mlp) for layer in layers):
            return NativeDecoder(self._team, spec, layers, **parts)
        return Decoder(spec, layers, operations=self.operations, **parts)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: one view of a mapped checkpoint would keep all of it mapped, also what has been packed."""
    return tensor.clone(memory_format=torch.contiguous_format)


class _Parts(NamedTuple):
    """What a feed-forward part is made of."""

    #: what every token passes
    dense: NativeSwiGLU | None
    experts: tuple[PackedRouter, PackedExperts] | None


def _parts(mlp: FeedForward) -> _Parts | None:
    """None if not all of it is native."""
    if isinstance(mlp, NativeSwiGLU):
        return _Parts(mlp, None)
    if not (isinstance(mlp, SparseMLP) and isinstance(mlp.router, NativeRouter)):
        return None
    if not (isinstance(mlp.experts, NativeExperts) and isinstance(mlp.shared, NativeSwiGLU | None)):
        return None
    return _Parts(mlp.shared, (mlp.router.packed, mlp.experts.packed))


def _middle(layer: Layer) -> int:
    """The inner dimension of a layer's dense part; 0 without one."""
    parts = _parts(layer.mlp)
    return parts.dense.down.packed.inner if parts and parts.dense else 0
