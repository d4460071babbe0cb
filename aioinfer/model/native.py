"""Native: linear layers and whole decoders over the kernels in C++ (:mod:`aioinfer.native`), on a CPU.

Weights are packed when a model is built, and their originals dropped. Every result is a function of its own
row, to the bit: it depends neither on the batch, nor on the number of threads, nor on how a prompt was cut
into chunks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.native_attention import NativeAttention
from aioinfer.model.backend import Backend
from aioinfer.model.batch import Batch
from aioinfer.model.decoder import Decoder, Layer
from aioinfer.model.linear import Linear
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.backend import make_sparse
from aioinfer.model.moe.native_experts import NativeExperts, NativeRouter
from aioinfer.model.moe.routing import Rule
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.operations.torch_operations import TorchOperations
from aioinfer.model.quantization import Quantization, Rounding, rounding_of
from aioinfer.model.rope import Rope
from aioinfer.model.spec import CausalLM, ModelSpec
from aioinfer.model.weights import StoredMatrix
from aioinfer.model.weights_cache import Blobs, MappedMemory
from aioinfer.native.arguments import Address, DecoderArguments, ForwardArguments, LayerArguments
from aioinfer.native.bindings import PARTS, PackedExperts, PackedRouter, Stack, ThreadPool
from aioinfer.native.tensors import NUMBERS, address

__all__ = ["NativeDecoder", "NativeLayers", "NativeSwiGLU"]


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
        pool: ThreadPool,
        spec: ModelSpec,
        layers: Sequence[Layer],
        *,
        embedding: torch.Tensor | NativeLinear | MappedMemory,
        norm: torch.Tensor,
        head: NativeLinear,
        eps: float,
        rope: Rope,
    ) -> None:
        """As :class:`~aioinfer.model.decoder.Decoder`; all parts of the layers are native. ``embedding`` may
        be a layer of rounded weights, the head's for example: its weights are the vectors. Mapped memory
        holds them as a tensor of the model's type does."""
        if head.packed.outputs != spec.vocab_size:
            raise ValueError(f"the head has {head.packed.outputs} outputs for {spec.vocab_size} tokens")
        self.spec = spec
        cos, sin = rope.table
        norm, dtype, rotary_dim = _own(norm), spec.dtype, cos.shape[-1]
        vectors, words, kept = _vectors(embedding, spec)
        constants = DecoderArguments(
            embedding=vectors,
            words=words,
            norm=address(norm, dtype, spec.hidden_size),
            head=head.packed.handle,
            cos=address(cos, dtype, len(cos) * rotary_dim),
            sin=address(sin, dtype, len(cos) * rotary_dim),
            positions=len(cos),
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            rotary_dim=rotary_dim,
            hidden=spec.hidden_size,
            head_norm_eps=next((layer.qk_norm.eps for layer in layers if layer.qk_norm is not None), 0.0),
            norm_eps=eps,
        )
        self._stack = Stack(pool, NUMBERS[dtype], constants, (kept, norm, head.packed, cos, sin))
        for layer in layers:
            self._add(layer)
        self._seconds = (ctypes.c_double * len(PARTS))()
        #: of every forward: a decoder computes one step at a time
        self._arguments = arguments = ForwardArguments.zeros()
        arguments.decoder, arguments.pool = self._stack.handle, pool.handle
        arguments.seconds = ctypes.addressof(self._seconds)

    def _add(self, layer: Layer) -> None:
        assert isinstance(layer.qkv, NativeLinear)
        assert isinstance(layer.out, NativeLinear)
        parts, spec, params = _parts(layer.mlp), self.spec, layer.attention_params
        assert parts is not None
        qkv, out = layer.qkv.packed, layer.out.packed
        gate_up = down = router = experts = None
        if parts.dense is not None:
            gate_up, down = parts.dense.gate_up.packed, parts.dense.down.packed
        if parts.experts is not None:
            router, experts = parts.experts
        attention_norm, mlp_norm = _own(layer.attention_norm), _own(layer.mlp_norm)
        head_norm = None if layer.qk_norm is None else _own(layer.qk_norm.weight)
        normed_heads = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        arguments = LayerArguments(
            decoder=self._stack.handle,
            attention_norm=address(attention_norm, spec.dtype, spec.hidden_size),
            qkv=qkv.handle,
            head_norm=None if head_norm is None else address(head_norm, spec.dtype, normed_heads),
            out=out.handle,
            mlp_norm=address(mlp_norm, spec.dtype, spec.hidden_size),
            gate_up=None if gate_up is None else gate_up.handle,
            down=None if down is None else down.handle,
            router=None if router is None else router.handle,
            experts=None if experts is None else experts.handle,
            window=params.window or 0,
            block=params.block,
            scale=params.scale,
            soft_cap=params.soft_cap or 0.0,
        )
        tensors = attention_norm, head_norm, mlp_norm
        self._stack.add_layer(arguments, (*tensors, qkv, out, gate_up, down, router, experts))

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        """See :class:`~aioinfer.model.spec.CausalLM`."""
        assert isinstance(attention, NativeAttention), "native layers go with native attention"
        arguments, int64 = self._arguments, torch.int64
        tokens, rows, wanted = len(batch.input_ids), len(batch.q_lens), len(batch.logits_rows)
        table_width = batch.block_table.shape[1]
        logits = torch.empty(wanted, self.spec.vocab_size)
        arguments.kv_pools, arguments.page_size = attention.kv_pools, attention.page_size
        arguments.num_pages = attention.num_pages
        arguments.tokens, arguments.rows, arguments.num_logits = tokens, rows, wanted
        arguments.input_ids = address(batch.input_ids, int64, tokens)
        arguments.positions = address(batch.positions, int64, tokens)
        arguments.slot_mapping = address(batch.slot_mapping, int64, tokens)
        arguments.cu_q = address(batch.cu_q, int64, rows + 1)
        arguments.kv_len = address(batch.kv_len, int64, rows)
        arguments.block_table = address(batch.block_table, int64, rows * table_width)
        arguments.table_width = table_width
        arguments.logits_rows = address(batch.logits_rows, int64, wanted)
        arguments.logits = logits.data_ptr()
        self._stack.forward(arguments)
        return logits

    @property
    def seconds(self) -> dict[str, float]:
        """What each part of all forwards so far has taken."""
        return dict(zip(PARTS, self._seconds, strict=True))


class NativeLayers:
    """See :class:`~aioinfer.model.layers.LayerKernels`."""

    native = True

    def __init__(
        self, pool: ThreadPool, quantization: Quantization = "auto", blobs: Blobs | None = None
    ) -> None:
        """``blobs``: where packed weights are, or are left; None: nowhere."""
        self._pool = pool
        #: weights that are quantised in the checkpoint stay as they are
        self._kept = quantization == "auto"
        self.kept_bits: set[int] = set()
        self._rounding, self._head_rounding = rounding_of(quantization), rounding_of(quantization, head=True)
        self._blobs = blobs
        self.operations = TorchOperations()

    def linear(self, stored: StoredMatrix) -> Linear:
        return self._packed(stored, self._rounding)

    def swiglu(self, gate_up: StoredMatrix, down: StoredMatrix) -> FeedForward:
        return NativeSwiGLU(
            self._packed(gate_up, self._rounding, gated=True), self._packed(down, self._rounding)
        )

    def sparse(
        self, rule: Rule, stored: StoredExperts, shared: FeedForward | None, backend: Backend
    ) -> FeedForward:
        if backend.name != "native":
            if self._rounding is not None:
                raise ConfigError(f"quantization: experts are computed by {backend.name}: {backend.reason}")
            return make_sparse(rule, stored, shared, backend)
        dtype, sizes = stored.weights.dtype, (stored.num_experts, stored.hidden, stored.middle)
        blobs, name = self._blobs, stored.prefix
        found = None if blobs is None else blobs.find(name)
        if found is not None:
            stored.declare()
        experts = NativeExperts(self._pool, dtype, sizes, found or stored.each(), self._rounding)
        if found is None and blobs is not None:
            blobs.add(name, *experts.packed.memory)
        return SparseMLP(NativeRouter(self._pool, rule, dtype), experts, shared)

    def decoder(
        self,
        spec: ModelSpec,
        layers: Sequence[Layer],
        *,
        embedding: StoredMatrix,
        head: StoredMatrix,
        **parts: Any,
    ) -> CausalLM:
        tied, cached = head is embedding, self._blobs is not None
        # The vectors of a quantised embedding are read from it as it is packed.
        quantised = self._head_rounding is not None or self._quantised(embedding)
        # A tied embedding that both need is read once.
        words = embedding.view() if tied and not cached and not quantised else None
        to_logits = self._packed(head, self._head_rounding, weight=words)
        if not all(_parts(layer.mlp) for layer in layers):
            words = embedding.view() if words is None else words
            return Decoder(spec, layers, embedding=words, head=to_logits, operations=self.operations, **parts)
        vectors: torch.Tensor | NativeLinear | MappedMemory
        if not quantised:
            vectors = self._vectors(embedding) if words is None else words
        else:
            vectors = to_logits if tied else self._packed(embedding, self._head_rounding)
        return NativeDecoder(self._pool, spec, layers, embedding=vectors, head=to_logits, **parts)

    def _quantised(self, stored: StoredMatrix) -> bool:
        """Whether a matrix is quantised in the checkpoint and stays so."""
        return self._kept and stored.rounding is not None

    def _vectors(self, embedding: StoredMatrix) -> torch.Tensor | MappedMemory:
        """An embedding, neither packed nor rounded."""
        blobs, name = self._blobs, f"{embedding.name}, as it is"
        if blobs is None:
            return embedding.view()
        found = blobs.find(name)
        if found is not None:
            return found
        words = embedding.view().contiguous()
        blobs.add(name, words.data_ptr(), words.nbytes)
        return words

    def _packed(
        self,
        stored: StoredMatrix,
        rounding: Rounding | None,
        *,
        gated: bool = False,
        weight: torch.Tensor | None = None,
    ) -> NativeLinear:
        """``weight``: the matrix, if it has been read."""
        shape, pool, blobs = stored.shape, self._pool, self._blobs
        if self._quantised(stored):
            return self._as_stored(stored, gated=gated)
        own = None if rounding is None else rounding.for_size(shape[1])
        found = None if blobs is None else blobs.find(stored.name)
        if found is not None:
            return NativeLinear.mapped(
                pool, found, stored.bias(), shape, own, dtype=stored.dtype, gated=gated
            )
        packed = NativeLinear(
            pool, stored.view() if weight is None else weight, stored.bias(), own, gated=gated
        )
        if blobs is not None:
            blobs.add(stored.name, *packed.packed.memory)
        return packed

    def _as_stored(self, stored: StoredMatrix, *, gated: bool) -> NativeLinear:
        """A matrix that is quantised in the checkpoint, without loss."""
        if self._blobs is not None:
            raise ConfigError("cache_weights: weights that are quantised in the checkpoint are not cached")
        matrix, bias = stored.quantised(), stored.bias()
        self.kept_bits.add(matrix.rounding.bits)
        return NativeLinear.given(
            self._pool,
            matrix.values,
            matrix.scales,
            matrix.offsets,
            None if bias is None else bias.float(),
            matrix.rounding,
            dtype=stored.dtype,
            gated=gated,
        )


def _vectors(
    embedding: torch.Tensor | NativeLinear | MappedMemory, spec: ModelSpec
) -> tuple[Address, Address, object]:
    """The address of an embedding, or of a layer of rounded weights, and the owner of either.

    Raises ValueError: it has another size."""
    if isinstance(embedding, NativeLinear):
        return None, embedding.packed.handle, embedding.packed
    count = spec.vocab_size * spec.hidden_size
    if isinstance(embedding, MappedMemory):
        if embedding.size != count * spec.dtype.itemsize:
            raise ValueError(f"an embedding of {embedding.size} bytes")
        return embedding.address, None, embedding.owner
    vectors = _own(embedding)
    return address(vectors, spec.dtype, count), None, vectors


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """A copy: a view of a mapped checkpoint would keep all of it mapped, packed weights included."""
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
