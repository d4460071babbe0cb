"""NativeLayers: makes the parts of a native model from the matrices of a checkpoint, rounded or not."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import torch

from aioinfer.checkpoint.tensors import QuantisedMatrix
from aioinfer.errors import ConfigError
from aioinfer.model.adapters.targets import AdapterTargets
from aioinfer.model.decoder import Decoder
from aioinfer.model.gates import Gate
from aioinfer.model.layer import Trunk
from aioinfer.model.layer_kernels import ExpertKernels, LayerKernels
from aioinfer.model.linear import Linear
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.native_experts import NativeExperts, NativeRouter
from aioinfer.model.moe.routing import Router, Rule
from aioinfer.model.moe.sparse import StoredExperts
from aioinfer.model.native import NativeDecoder, NativeMLP, NativeTargets, parts_of
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.operations.native_operations import NativeOperations
from aioinfer.model.quantization import Quantization, Rounding, rounding_of
from aioinfer.model.spec import CausalLM, ModelSpec
from aioinfer.model.vision.native_attention import NativeTwoWayAttention
from aioinfer.model.weights import StoredMatrix
from aioinfer.model.weights_cache import Blobs, MappedMemory
from aioinfer.native.bindings import ThreadPool, arithmetic
from aioinfer.native.tensors import NUMBERS

__all__ = ["NativeLayers"]


class NativeLayers(LayerKernels):
    """Makes layers of packed weights."""

    def __init__(
        self,
        pool: ThreadPool,
        dtype: torch.dtype,
        quantization: Quantization = "auto",
        blobs: Blobs | None = None,
        max_lora_rank: int = 0,
        experts: ExpertKernels | None = None,
    ) -> None:
        """
        Args:
            blobs: the file of packed weights; None: there is none.
            max_lora_rank: the largest rank of adapters; 0: there are none.
            experts: makes experts that are not native; None: they are native.
        """
        super().__init__(
            NativeOperations(pool),
            experts or ExpertKernels(self._router, self._native_experts),
            NativeTwoWayAttention(pool, dtype),
        )
        self._pool, self._dtype = pool, dtype
        self._targets = NativeTargets(AdapterTargets(), {}, max_lora_rank) if max_lora_rank else None
        #: weights that are quantised in the checkpoint stay as they are
        self._kept = quantization == "auto"
        self._kept_bits: set[int] = set()
        self._rounding, self._head_rounding = rounding_of(quantization), rounding_of(quantization, head=True)
        self._blobs = blobs
        #: some weights are neither rounded nor quantised
        self._packs = False

    @property
    def kept_bits(self) -> Collection[int]:
        return self._kept_bits

    def _linear(self, stored: StoredMatrix, *, exact: bool) -> Linear:
        return self._packed(stored, None if exact else self._rounding)

    def _by_head(self, stored: StoredMatrix, heads: int) -> Linear:
        return self._packed(stored, self._rounding)

    def _table(self, stored: StoredMatrix) -> torch.Tensor | Linear:
        # Adapters do not change it.
        if self._quantised(stored):
            return self._made(stored, None, gated=False, weight=None)
        return stored.view()

    def _gated_mlp(self, gate_up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        both = self._packed(gate_up, self._rounding, gated=True)
        return NativeMLP(both, self._packed(down, self._rounding), gate)

    def _plain_mlp(self, up: StoredMatrix, down: StoredMatrix, gate: Gate) -> FeedForward:
        return NativeMLP(self._packed(up, self._rounding), self._packed(down, self._rounding), gate)

    def _router(self, rule: Rule) -> Router:
        if getattr(rule, "capacity", 0):
            return rule  # of no single token
        return NativeRouter(self._pool, rule, self._dtype)

    def _native_experts(self, stored: StoredExperts) -> NativeExperts:
        kept = stored.roundings() if self._kept else None
        if kept is None:
            self._packs |= self._rounding is None
        else:
            self._kept_bits.update(each.bits for each in kept)
        # Read where they are not in the cache, each when it is packed.
        stored.declare()
        matrices: Iterator[Sequence[torch.Tensor | QuantisedMatrix]]
        matrices = stored.each() if kept is None else stored.each_quantised()
        biases = stored.biases()
        layers = [
            self._expert(stored, index, lambda: next(matrices), kept, biases)
            for index in range(stored.num_experts)
        ]
        return NativeExperts(self._pool, layers, stored.gate)

    def _expert(
        self,
        stored: StoredExperts,
        index: int,
        read: Callable[[], Sequence[torch.Tensor | QuantisedMatrix]],
        kept: tuple[Rounding, Rounding] | None,
        biases: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> tuple[NativeLinear, NativeLinear]:
        """``read`` returns the matrices of this expert; ``kept``: their roundings, if they stay so."""
        pair = functools.cache(read)
        shapes = (stored.rows, stored.hidden), (stored.hidden, stored.middle)

        def made(at: int, what: str) -> NativeLinear:
            own = kept[at] if kept else self._rounding and self._rounding.for_size(shapes[at][1])
            name, bias = f"{stored.prefix}.{index}.{what}", None if biases is None else biases[at][index]
            form = {"kept": kept is not None, "gated": at == 0 and len(stored.names) > 2}
            return self._cached(name, lambda: pair()[at], bias, shapes[at], own, **form)

        return made(0, "gate_up"), made(1, "down")

    def _decoder(self, spec: ModelSpec, trunk: Trunk, words: StoredMatrix, head: StoredMatrix) -> CausalLM:
        tied, cached = head is words, self._blobs is not None
        # The vectors of a quantised embedding are read from it as it is packed.
        quantised = self._head_rounding is not None or self._quantised(words)
        # A tied embedding that both need is read once.
        read = words.view() if tied and not cached and not quantised else None
        to_logits = self._packed(head, self._head_rounding, weight=read)
        if not all(layer.mlp is None or parts_of(layer.mlp) for layer in trunk.layers):
            if spec.latent:
                raise ConfigError("moe_backend: native attention over latents needs native experts")
            read = words.view() if read is None else read
            reason = "not all of its layers are native"
            return Decoder(spec, trunk, read, to_logits, self.operations, adapter_reason=reason)
        vectors: torch.Tensor | NativeLinear | MappedMemory
        if not quantised:
            vectors = self._vectors(words) if read is None else read
        else:
            vectors = to_logits if tied else self._packed(words, self._head_rounding)
        rotary = sorted({rope.digest for layer in trunk.layers if (rope := layer.mixer.rope) is not None})
        names = [
            arithmetic(NUMBERS[self._dtype], packed=self._packs),
            *(["rotary", *rotary] if rotary else []),
        ]
        spec = replace(spec, arithmetic=" ".join(names))
        if self._targets is not None:
            targets, handle = self._targets.targets, to_logits.packed.handle
            self._targets.indices[handle] = targets.add_head(*head.shape, head.again)
            if trunk.embedding.positions is None:
                targets.add_words(words.name, words.shape, words.again)
        return NativeDecoder(self._pool, spec, trunk, vectors, to_logits, self._targets)

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
        made = self._made(stored, rounding, gated=gated, weight=weight)
        if self._targets is not None:
            index = self._targets.targets.add(stored)
            if index is not None:
                self._targets.indices[made.packed.handle] = index
        return made

    def _made(
        self,
        stored: StoredMatrix,
        rounding: Rounding | None,
        *,
        gated: bool,
        weight: torch.Tensor | None,
    ) -> NativeLinear:
        kept = self._quantised(stored)
        if kept:
            own = stored.rounding
            assert own is not None
            self._kept_bits.add(own.bits)
        else:
            own = None if rounding is None else rounding.for_size(stored.shape[1])
            self._packs |= own is None

        def read() -> torch.Tensor | QuantisedMatrix:
            if kept:
                return stored.quantised()
            return stored.view() if weight is None else weight

        return self._cached(stored.name, read, stored.bias(), stored.shape, own, kept=kept, gated=gated)

    def _cached(
        self,
        name: str,
        read: Callable[[], torch.Tensor | QuantisedMatrix],
        bias: torch.Tensor | None,
        shape: tuple[int, int],
        rounding: Rounding | None,
        *,
        kept: bool,
        gated: bool,
    ) -> NativeLinear:
        """A layer from the file of packed weights, or from a matrix, which is then left there; ``kept``: that
        is quantised already, as ``rounding`` says."""
        pool, blobs, dtype = self._pool, self._blobs, self._dtype
        found = None if blobs is None else blobs.find(name)
        if found is not None:
            return NativeLinear.mapped(
                pool, found, bias, shape, rounding, dtype=dtype, gated=gated, kept=kept
            )
        matrix = read()
        if isinstance(matrix, QuantisedMatrix):
            made = NativeLinear.given(pool, matrix, bias, dtype=dtype, gated=gated)
        else:
            made = NativeLinear(pool, matrix, bias, rounding, gated=gated)
        if blobs is not None:
            blobs.add(name, *made.packed.memory, made.packed.factors)
        return made
