"""NativeLayers: makes the parts of a native model from the matrices of a checkpoint, rounded or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.adapters.targets import AdapterTargets
from aioinfer.model.backend import Backend
from aioinfer.model.decoder import Decoder, Layer
from aioinfer.model.gates import Gate
from aioinfer.model.linear import Linear
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.backend import make_sparse
from aioinfer.model.moe.native_experts import NativeExperts, NativeRouter
from aioinfer.model.moe.routing import Rule
from aioinfer.model.moe.sparse import SparseMLP, StoredExperts
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.operations.torch_operations import TorchOperations
from aioinfer.model.quantization import Quantization, Rounding, rounding_of
from aioinfer.model.spec import CausalLM, ModelSpec
from aioinfer.model.weights import StoredMatrix
from aioinfer.model.weights_cache import Blobs, MappedMemory
from aioinfer.native.bindings import ThreadPool

if TYPE_CHECKING:
    pass

from aioinfer.model.native import NativeDecoder, NativeMLP, parts_of

__all__ = ["NativeLayers"]


class NativeLayers:
    """See :class:`~aioinfer.model.layers.LayerKernels`."""

    native = True

    def __init__(
        self,
        pool: ThreadPool,
        quantization: Quantization = "auto",
        blobs: Blobs | None = None,
        max_lora_rank: int = 0,
    ) -> None:
        """``blobs``: where packed weights are, or are left; None: nowhere. ``max_lora_rank``: 0: without
        adapters."""
        self._pool = pool
        self._max_lora_rank = max_lora_rank
        self._targets = AdapterTargets() if max_lora_rank else None
        #: among these, by the handles of packed weights
        self._indices: dict[int, int] = {}
        #: weights that are quantised in the checkpoint stay as they are
        self._kept = quantization == "auto"
        self.kept_bits: set[int] = set()
        self._rounding, self._head_rounding = rounding_of(quantization), rounding_of(quantization, head=True)
        self._blobs = blobs
        self.operations = TorchOperations()

    def linear(self, stored: StoredMatrix, *, exact: bool = False) -> Linear:
        return self._packed(stored, None if exact else self._rounding)

    def gated_mlp(
        self, gate_up: StoredMatrix, down: StoredMatrix, gate: Gate, *, shared: bool = False
    ) -> FeedForward:
        # A shared expert reads the inputs of the others, whose weights are never as they are stored.
        both = self._packed(gate_up, self._rounding, gated=True, as_stored=not shared)
        return NativeMLP(both, self._packed(down, self._rounding, as_stored=not shared), gate)

    def plain_mlp(self, up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        return NativeMLP(self._packed(up, self._rounding), self._packed(down, self._rounding), gate)

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
        experts = NativeExperts(
            self._pool,
            dtype,
            sizes,
            found or stored.each(),
            self._rounding,
            gate=stored.gate,
            biases=stored.biases(),
        )
        if found is None and blobs is not None:
            blobs.add(name, *experts.packed.memory)
        return SparseMLP(NativeRouter(self._pool, rule, dtype), experts, shared)

    def decoder(
        self,
        spec: ModelSpec,
        layers: Sequence[Layer],
        *,
        words: StoredMatrix,
        head: StoredMatrix,
        **parts: Any,
    ) -> CausalLM:
        tied, cached = head is words, self._blobs is not None
        # The vectors of a quantised embedding are read from it as it is packed.
        quantised = self._head_rounding is not None or self._quantised(words)
        # A tied embedding that both need is read once.
        read = words.view() if tied and not cached and not quantised else None
        to_logits = self._packed(head, self._head_rounding, weight=read)
        if not all(parts_of(layer.mlp) for layer in layers):
            read = words.view() if read is None else read
            return Decoder(
                spec,
                layers,
                words=read,
                head=to_logits,
                operations=self.operations,
                adapter_reason="not all of its layers are native",
                **parts,
            )
        vectors: torch.Tensor | NativeLinear | MappedMemory
        if not quantised:
            vectors = self._vectors(words) if read is None else read
        else:
            vectors = to_logits if tied else self._packed(words, self._head_rounding)
        return NativeDecoder(
            self._pool,
            spec,
            layers,
            words=vectors,
            head=to_logits,
            targets=self._targets,
            indices=self._indices,
            max_lora_rank=self._max_lora_rank,
            **parts,
        )

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
        as_stored: bool = True,
    ) -> NativeLinear:
        """``weight``: the matrix, if it has been read; ``as_stored``: one that is quantised may stay so."""
        made = self._made(stored, rounding, gated=gated, weight=weight, as_stored=as_stored)
        index = None if self._targets is None else self._targets.add(stored)
        if index is not None:
            self._indices[made.packed.handle] = index
        return made

    def _made(
        self,
        stored: StoredMatrix,
        rounding: Rounding | None,
        *,
        gated: bool,
        weight: torch.Tensor | None,
        as_stored: bool,
    ) -> NativeLinear:
        shape, pool, blobs = stored.shape, self._pool, self._blobs
        if as_stored and self._quantised(stored):
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
