"""Native: linear layers and whole decoders over the kernels in C++ (:mod:`aioinfer.native`), on a CPU.

Weights are packed when a model is built, and their originals dropped. Every result is a function of its own
row, to the bit: it depends neither on the batch, nor on the number of threads, nor on how a prompt was cut
into chunks.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from math import isnan, prod
from typing import Any, NamedTuple

import torch

from aioinfer.model.adapters.targets import AdapterTargets
from aioinfer.model.attention.base import Attention
from aioinfer.model.attention.native_attention import NativeAttention
from aioinfer.model.batch import Batch
from aioinfer.model.gates import Gate
from aioinfer.model.layer import Embedding, Layer, Trunk
from aioinfer.model.mlp import FeedForward
from aioinfer.model.moe.dual import DualMLP
from aioinfer.model.moe.native_experts import NativeExperts, NativeRouter
from aioinfer.model.moe.sparse import GatedExpert, SparseMLP
from aioinfer.model.native_adapters import NativeAdapters
from aioinfer.model.native_linear import NativeLinear
from aioinfer.model.native_mixers import Kept, Rekept, mixer_arguments, projections
from aioinfer.model.norm import Norm
from aioinfer.model.per_layer import PerLayerInputs, PerLayerPart
from aioinfer.model.rope import Rotary
from aioinfer.model.spec import Change, ModelSpec, Recipe
from aioinfer.model.state import RowStates, StatePool
from aioinfer.model.updates.new_weights import is_missing
from aioinfer.model.vision.base import Encoder, Features
from aioinfer.model.weights import StoredMatrix
from aioinfer.model.weights_cache import MappedMemory
from aioinfer.native.arguments import (
    DecoderArguments,
    DualArguments,
    EmbedArguments,
    ForwardArguments,
    LayerArguments,
    PerLayerArguments,
    PerLayerInputsArguments,
)
from aioinfer.native.bindings import GATES, PARTS, ThreadPool
from aioinfer.native.packed import PackedExperts, PackedRouter, Stack
from aioinfer.native.structures import Address
from aioinfer.native.tensors import NUMBERS, address

__all__ = ["NativeDecoder", "NativeMLP", "NativeTargets", "parts_of"]

#: arguments of a layer without a feed-forward part
_NO_MLP: dict[str, Any] = {
    **dict.fromkeys(("gate_up", "down", "router", "experts", "shared_gate")),
    "gate": GATES["none"],
}


class NativeMLP:
    """A dense feed-forward part with packed weights, gated or not, in two calls."""

    __slots__ = ("down", "gate", "gate_up")

    def __init__(self, gate_up: NativeLinear, down: NativeLinear, gate: Gate = "silu") -> None:
        self.gate_up = gate_up
        self.down = down
        self.gate = gate

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(hidden, self.gate))


class NativeTargets(NamedTuple):
    """The layers of a native model that adapters can change."""

    targets: AdapterTargets
    #: indices among the targets, by the handles of packed weights
    indices: dict[int | None, int]
    #: the largest rank of an adapter
    max_rank: int


class NativeDecoder:
    """A :class:`~aioinfer.model.spec.CausalLM` of native layers: one call computes a step, without the
    interpreter's lock.

    Logits are float32 for every type of the model. Its attention must be a
    :class:`~aioinfer.model.attention.native_attention.NativeAttention`.
    """

    capturable = False
    invariant = True
    encoder: Encoder | None = None

    def __init__(
        self,
        pool: ThreadPool,
        spec: ModelSpec,
        trunk: Trunk,
        words: torch.Tensor | NativeLinear | MappedMemory,
        head: NativeLinear,
        targets: NativeTargets | None = None,
    ) -> None:
        """
        Args:
            trunk: all parts of its layers are native, and all norms of the residual have the same eps.
            words: the vectors of tokens; of a layer of rounded weights, the head's for example, these.
                Mapped memory holds them as a tensor of the model's type does.
            targets: the layers that adapters can change; None: adapters are not computed.
        """
        if head.packed.outputs != spec.vocab_size:
            raise ValueError(f"the head has {head.packed.outputs} outputs for {spec.vocab_size} tokens")
        self.spec = spec
        self.classifier: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._eps, embedding = trunk.norm.eps, trunk.embedding
        self._word_scale = embedding.scale
        self._logit_scale, self._logit_cap = trunk.logit_scale, trunk.logit_cap or 0.0
        self._ropes = {id(rope): rope for layer in trunk.layers if (rope := layer.mixer.rope) is not None}
        #: owners of what the arguments refer to, until the stack has them
        self._keep = Kept([head.packed])
        #: not copied: what is mapped stays in its file
        self._table = None if embedding.per_layer is None else embedding.per_layer.table
        vectors, quantised, kept = _vectors(words, spec)
        constants = DecoderArguments(
            embedding=vectors,
            words=quantised,
            **self._constants(embedding, trunk.norm),
            head=head.packed.handle,
            logit_scale=self._logit_scale,
            logit_cap=self._logit_cap,
        )
        self._stack = Stack(pool, NUMBERS[spec.dtype], constants, self._keep)
        #: the vectors of tokens in their stored form, and the head
        self._words, self._head = words if isinstance(words, NativeLinear) else kept, head
        self._vectors_at = vectors
        #: copies of small tensors, for the constants and for each layer
        self._copies = [self._keep.copies]
        places: dict[int, tuple[int, int]] = {}
        for index, layer in enumerate(trunk.layers):
            self._keep = Kept()
            self._stack.add_layer(self._layer(layer), self._keep)
            self._copies.append(self._keep.copies)
            for part, handle in enumerate(_adaptable(layer)):
                if targets is not None and handle in targets.indices:
                    places[targets.indices[handle]] = index, part
        self.adapters: NativeAdapters | None = None
        if targets is not None:
            if head.packed.handle in targets.indices:
                places[targets.indices[head.packed.handle]] = len(trunk.layers), 0
            self.adapters = NativeAdapters(self._stack, targets.targets, places, targets.max_rank)
        self.adapter_reason = "" if targets is not None else "max_lora_rank is 0"
        self.updates: Recipe | None = None
        self._seconds = (ctypes.c_double * len(PARTS))()
        #: arguments of every forward: a decoder computes one step at a time
        self._arguments = arguments = ForwardArguments.zeros()
        arguments.decoder, arguments.pool = self._stack.handle, pool.handle
        arguments.seconds = ctypes.addressof(self._seconds)
        #: the pool of states of the last forward, and the addresses of its tensors
        self._pool: StatePool | None = None
        self._cells: ctypes.Array[ctypes.c_void_p] | None = None
        self._stashes: ctypes.Array[ctypes.c_void_p] | None = None

    def _constants(self, embedding: Embedding, norm: Norm) -> dict[str, Any]:
        spec, positions = self.spec, embedding.positions
        weight, bias = self._norm(norm)
        return {
            "norm": weight,
            "norm_bias": bias,
            "norm_eps": norm.eps,
            "embedding_scale": embedding.scale,
            "position_embedding": None
            if positions is None
            else self._keep.copy_of(positions, spec.dtype, spec.max_model_len * spec.hidden_size),
            "positions": spec.max_model_len,
            "hidden": spec.hidden_size,
            "per_layer": None if embedding.per_layer is None else self._per_layer_inputs(embedding.per_layer),
        }

    @property
    def matrices(self) -> tuple[NativeLinear | None, NativeLinear]:
        """The linear layers of the vectors of tokens and of the head that :meth:`rewrite` does not write."""
        words = self._words if isinstance(self._words, NativeLinear) else None
        return None if words is self._head else words, self._head

    def rewrite(self, trunk: Trunk, words: StoredMatrix | None, *, mapped: bool) -> Iterator[Change]:
        vectors, embedding = self._words, trunk.embedding
        if words is not None and isinstance(vectors, torch.Tensor):
            yield partial(_copy, vectors, words)
        self._keep = parts = Rekept(self._copies[0])
        self._constants(embedding, trunk.norm)
        yield parts.write
        table = None if embedding.per_layer is None else embedding.per_layer.table
        if isinstance(table, torch.Tensor) and not is_missing(table):
            yield partial(self._set_table, table, mapped=mapped)
        for index, (layer, copies) in enumerate(zip(trunk.layers, self._copies[1:], strict=True)):
            self._keep = parts = Rekept(copies)
            arguments = self._layer(layer)
            yield parts.write
            if not isnan(layer.scale):
                yield partial(self._stack.set_residual_scale, index, arguments.residual_scale)

    def _set_table(self, table: torch.Tensor, *, mapped: bool) -> None:
        table = table if mapped else table.clone(memory_format=torch.contiguous_format)
        self._stack.set_table(address(table, self.spec.dtype, table.numel()))
        self._table = table

    def _layer(self, layer: Layer) -> LayerArguments:
        mixer = mixer_arguments(layer.mixer, self.spec, self._keep)
        mlp = _NO_MLP if layer.mlp is None else self._mlp(layer.mlp)
        dual = layer.mlp if isinstance(layer.mlp, DualMLP) else None
        assert dual is None or layer.mlp_norm is None, "parts side by side have norms of their own"
        mixer_norm = self._norm(layer.mixer_norm)
        mlp_norm = self._norm(dual.dense_norm if dual else layer.mlp_norm)
        post_norms = self._norm(layer.mixer_post_norm), self._norm(layer.mlp_post_norm)
        assert not any(bias for _, bias in post_norms), "layer norms are in front of a part"
        word_norm, word_bias = self._norm(layer.word_norm)
        assert word_bias is None, "vectors of tokens have no layer norm"
        return LayerArguments(
            decoder=self._stack.handle,
            word_norm=word_norm,
            mixer_norm=mixer_norm[0],
            mixer_norm_bias=mixer_norm[1],
            **mixer,
            mixer_post_norm=post_norms[0][0],
            mlp_norm=mlp_norm[0],
            mlp_norm_bias=mlp_norm[1],
            **mlp,
            mlp_post_norm=post_norms[1][0],
            dual=None if dual is None else self._dual(dual),
            per_layer=None if layer.per_layer is None else self._per_layer(layer.per_layer),
            residual_scale=layer.scale,
            part_scale=layer.part_scale,
            parallel=layer.parallel,
        )

    def _mlp(self, mlp: FeedForward) -> dict[str, Any]:
        parts = parts_of(mlp)
        assert parts is not None
        gate_up = down = router = experts = None
        if parts.dense is not None:
            gate_up, down = parts.dense.gate_up.packed, parts.dense.down.packed
        if parts.experts is not None:
            router, experts = parts.experts
        self._keep += (gate_up, down, router, experts)
        return {
            "gate_up": None if gate_up is None else gate_up.handle,
            "down": None if down is None else down.handle,
            "router": None if router is None else router.handle,
            "experts": None if experts is None else experts.handle,
            "gate": GATES[parts.gate],
            "shared_gate": self._keep.floats(parts.shared_gate, self.spec.hidden_size),
        }

    def _dual(self, mlp: DualMLP) -> int:
        """Address of the norms of a dense part and experts side by side."""
        norms = (mlp.router_norm, mlp.experts_norm, mlp.dense_post_norm, mlp.experts_post_norm)
        router, experts, dense_post, experts_post = (self._norm(norm)[0] for norm in norms)
        return self._keep.nested(
            DualArguments(
                router_norm=router,
                experts_norm=experts,
                dense_post_norm=dense_post,
                experts_post_norm=experts_post,
            )
        )

    def _per_layer_inputs(self, inputs: PerLayerInputs) -> int:
        table, size = self._table, inputs.size
        assert isinstance(table, (torch.Tensor, NativeLinear)), "native layers have no other tables"
        whole = table if isinstance(table, torch.Tensor) else None
        rows = table.rows if isinstance(table, NativeLinear) else len(table)
        if rows < self.spec.vocab_size or inputs.norm.eps != self._eps:
            raise ValueError("inputs by layer for fewer tokens, or with another eps")
        arguments = PerLayerInputsArguments(
            table=None if whole is None else address(whole, self.spec.dtype, whole.numel()),
            words=None if isinstance(table, torch.Tensor) else self._keep.layer(table),
            projection=self._keep.layer(inputs.projection),
            norm=self._keep.floats(inputs.norm.weight, size),
            layers=inputs.layers,
            size=size,
            table_scale=inputs.table_scale,
            projection_scale=inputs.projection_scale,
            sum_scale=inputs.sum_scale,
        )
        return self._keep.nested(arguments)

    def _per_layer(self, part: PerLayerPart) -> int:
        post_norm, _ = self._norm(part.post_norm)
        arguments = PerLayerArguments(
            gate=self._keep.layer(part.gate),
            out=self._keep.layer(part.out),
            function=GATES[part.function],
            post_norm=post_norm,
        )
        return self._keep.nested(arguments)

    def _norm(self, norm: Norm | None) -> tuple[Address, Address]:
        """The addresses of its weight and bias."""
        if norm is None:
            return None, None
        size = self.spec.hidden_size
        if norm.eps != self._eps or norm.weight.numel() != size:
            raise ValueError("norms of one decoder have one size and one eps")
        return self._keep.floats(norm.weight, size), self._keep.floats(norm.bias, size)

    def forward(self, batch: Batch, attention: Attention) -> torch.Tensor:
        assert isinstance(attention, NativeAttention), "native layers go with native attention"
        arguments, int64 = self._arguments, torch.int64
        tokens, rows, wanted = len(batch.input_ids), len(batch.q_lens), len(batch.logits_rows)
        table_width = batch.block_table.shape[1]
        logits = torch.empty(wanted, self.spec.vocab_size)
        arguments.kv_pools, arguments.num_kv_pools = attention.kv_pools, attention.num_kv_pools
        arguments.page_size, arguments.num_pages = attention.page_size, attention.num_pages
        arguments.tokens, arguments.rows, arguments.num_logits = tokens, rows, wanted
        arguments.input_ids = address(batch.input_ids, int64, tokens)
        arguments.positions = address(batch.positions, int64, tokens)
        arguments.slot_mapping = address(batch.slot_mapping, int64, tokens)
        arguments.cu_q = address(batch.cu_q, int64, rows + 1)
        arguments.kv_len = address(batch.kv_len, int64, rows)
        arguments.block_table = address(batch.block_table, int64, rows * table_width)
        arguments.table_width = table_width
        arguments.ends = None if batch.ends is None else address(batch.ends, int64, tokens)
        arguments.logits_rows = address(batch.logits_rows, int64, wanted)
        arguments.logits = logits.data_ptr()
        arguments.adapters = None if batch.adapters is None else address(batch.adapters, int64, rows)
        chosen = batch.hidden_rows
        count = arguments.num_hidden = 0 if chosen is None else len(chosen)
        if chosen is not None:
            arguments.hidden_rows = address(chosen, int64, count)
            batch.hidden = torch.empty(count, self.spec.hidden_size)
            arguments.hidden = batch.hidden.data_ptr()
        wished = batch.places
        places = arguments.num_captured = 0 if wished is None else len(wished)
        if wished is not None:
            arguments.captured = address(wished, int64, places)
            batch.captured = torch.empty(tokens, places * self.spec.hidden_size, dtype=self.spec.dtype)
            arguments.captures = batch.captured.data_ptr()
        if self.spec.states:
            self._set_states(batch.states, rows)
        features = batch.features
        if batch.adapter_slots is not None and self.adapters is not None:
            features = self.adapters.with_words(batch, self._word_scale)
        self._set_features(features)
        rotary = self._rotary(batch)
        arguments.cos = None if rotary is None else address(rotary.cos, self.spec.dtype, rotary.cos.numel())
        arguments.sin = None if rotary is None else address(rotary.sin, self.spec.dtype, rotary.sin.numel())
        self._stack.forward(arguments)
        return logits

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """The vectors of tokens, [N, hidden], without positions."""
        count = len(ids)
        out = torch.empty(count, self.spec.hidden_size, dtype=self.spec.dtype)
        given = address(ids, torch.int64, count)
        self._stack.embed(
            EmbedArguments(decoder=self._stack.handle, ids=given, count=count, out=out.data_ptr())
        )
        return out

    def to_logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits [N, vocab_size] of normed hidden states [N, hidden]."""
        logits, cap = self._head(normed), self._logit_cap
        if self._logit_scale != 1.0:
            logits = logits * self._logit_scale
        return (logits / cap).tanh() * cap if cap else logits

    def beside(self, trunk: Trunk, positions: int) -> NativeDecoder | None:
        """A decoder of other layers, which know so many positions, over the vectors of tokens and the head of
        this one; None where its parts are not all native."""
        native = all(layer.mlp is None or parts_of(layer.mlp) for layer in trunk.layers)
        norms = [(each.word_norm, each.mixer_norm, each.mlp_norm) for each in trunk.layers]
        if not native or any(norm.eps != trunk.norm.eps for of_layer in norms for norm in of_layer if norm):
            return None
        words: NativeLinear | MappedMemory
        if isinstance(self._words, NativeLinear):
            words = self._words
        else:
            assert self._vectors_at is not None
            size = self.spec.vocab_size * self.spec.hidden_size * self.spec.dtype.itemsize
            words = MappedMemory(self._vectors_at, size, self._words)
        spec = replace(self.spec, num_layers=len(trunk.layers), max_model_len=positions, states=())
        trunk = replace(trunk, embedding=Embedding(scale=self._word_scale))
        return NativeDecoder(self._stack.pool, spec, trunk, words, self._head)

    def _rotary(self, batch: Batch) -> Rotary | None:
        """The factors of the tokens, where these have three positions each; None: those of the layers."""
        if batch.rotary is None:
            return None
        (rope,) = self._ropes.values()
        return rope.at(batch.positions, batch.rotary)

    def _set_features(self, features: Features | None) -> None:
        arguments = self._arguments
        arguments.num_features = arguments.num_deep = 0
        if features is not None:
            count, vectors = len(features.rows), features.vectors
            arguments.num_features, arguments.num_deep = count, len(vectors) - 1
            arguments.feature_rows = address(features.rows, torch.int64, count)
            size = len(vectors) * count * self.spec.hidden_size
            arguments.features = address(vectors, self.spec.dtype, size)

    def _set_states(self, states: RowStates | None, rows: int) -> None:
        assert states is not None, "a step of a model with recurrent state has cells"
        arguments, cells = self._arguments, states.pool.num_cells + 1
        if states.pool is not self._pool:
            shapes, tensors = self.spec.states, states.pool.tensors
            found = [
                address(tensor, shape.dtype, cells * prod(shape.shape))
                for shape, tensor in zip(shapes, tensors, strict=True)
            ]
            self._pool, self._cells = states.pool, (ctypes.c_void_p * len(found))(*found)
            arguments.state_pools, arguments.num_states = ctypes.addressof(self._cells), len(found)
            arguments.num_cells = cells
            stashes = states.pool.stashes
            found = [address(each, self.spec.dtype, each.numel()) for each in stashes]
            self._stashes = (ctypes.c_void_p * len(found))(*found)
            arguments.stash_pools = ctypes.addressof(self._stashes)
            arguments.num_stashes, arguments.num_drafts = (
                len(stashes[0]) if stashes else 0,
                states.pool.drafts,
            )
        arguments.read = address(states.read, torch.int64, rows)
        arguments.write = address(states.write, torch.int64, rows)
        arguments.replays = arguments.kept = None
        if states.replays is not None and states.kept is not None:
            arguments.replays = address(torch.from_numpy(states.replays), torch.int64, rows + 1)
            arguments.kept = address(torch.from_numpy(states.kept), torch.int64, rows)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part over all forwards so far."""
        return dict(zip(PARTS, self._seconds, strict=True))


def _copy(vectors: torch.Tensor, words: StoredMatrix) -> None:
    vectors.copy_(words.view())


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
    # A view of a mapped checkpoint would keep all of it mapped, packed weights included.
    vectors = embedding.clone(memory_format=torch.contiguous_format)
    return address(vectors, spec.dtype, count), None, vectors


def _adaptable(layer: Layer) -> list[int | None]:
    """The handles of the linear layers that can have adapters, in the order of
    :data:`~aioinfer.model.native_adapters.PARTS`."""
    into, out, *others = projections(layer.mixer)
    parts = None if isinstance(layer.mlp, SparseMLP | None) else parts_of(layer.mlp)
    dense = None if parts is None else parts.dense
    handles = (None, None) if dense is None else (dense.gate_up.packed.handle, dense.down.packed.handle)
    return [into, out, *handles, *others]


class _Parts(NamedTuple):
    """The native parts of a feed-forward part."""

    #: the part that every token passes
    dense: NativeMLP | None
    experts: tuple[PackedRouter, PackedExperts] | None
    gate: Gate
    #: [1, hidden], see :class:`~aioinfer.model.moe.sparse.GatedExpert`; or None
    shared_gate: torch.Tensor | None = None


def parts_of(mlp: FeedForward) -> _Parts | None:
    """The native parts of a feed-forward part; None if not all of it is native."""
    if isinstance(mlp, NativeMLP):
        return _Parts(mlp, None, mlp.gate)
    if isinstance(mlp, DualMLP):
        dense, sparse = parts_of(mlp.dense), parts_of(mlp.sparse)
        if dense is None or sparse is None or dense.gate != sparse.gate or sparse.dense is not None:
            return None
        return _Parts(dense.dense, sparse.experts, sparse.gate)
    if not (isinstance(mlp, SparseMLP) and isinstance(mlp.router, NativeRouter)):
        return None
    gated = mlp.shared if isinstance(mlp.shared, GatedExpert) else None
    shared, shared_gate = (mlp.shared, None) if gated is None else (gated.expert, gated.gate)
    if not (isinstance(mlp.experts, NativeExperts) and isinstance(shared, NativeMLP | None)):
        return None
    if shared is not None and shared.gate != mlp.experts.gate:
        return None
    return _Parts(shared, (mlp.router.packed, mlp.experts.packed), mlp.experts.gate, shared_gate)
