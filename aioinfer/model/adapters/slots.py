"""TorchAdapters: adapters of linear layers, computed by torch and added to the results of the layers.

The result for the tokens of an adapter gets ``scale * (x @ A.T) @ B.T``: two small matrix products for each
adapter of a step; with DoRA it is rescaled before. Steps without adapters cost a look at a variable for each
layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from aioinfer.checkpoint.adapter import AdapterFiles
from aioinfer.model.adapters.base import PreparedAdapter
from aioinfer.model.adapters.packed import PackedAdapter
from aioinfer.model.adapters.rows import runs
from aioinfer.model.adapters.targets import AdapterTargets, Base
from aioinfer.model.adapters.words import with_words
from aioinfer.model.batch import Batch
from aioinfer.model.linear import Linear
from aioinfer.model.vision.base import Features
from aioinfer.model.weights import StoredMatrix

__all__ = ["AdaptedLinear", "AdapterStep", "Group", "TorchAdapters"]


class AdapterStep(Protocol):
    """The adapters of the tokens of one step."""

    def add(self, index: int, values: torch.Tensor, result: torch.Tensor) -> None:
        """Add the summands of layer ``index``.

        Args:
           values: [T, inputs], the inputs of the layer.
           result: [T, outputs], contiguous; changed in place.
        """


class AdaptedLinear:
    """A linear layer with adapters."""

    __slots__ = ("_adapters", "_index", "linear")

    def __init__(self, linear: Linear, adapters: TorchAdapters, index: int) -> None:
        """``index``: of the layer, see :class:`~aioinfer.model.adapters.targets.AdapterTargets`."""
        #: the layer without adapters
        self.linear = linear
        self._adapters = adapters
        self._index = index

    def set(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
        self.linear.set(weight, bias)

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        result = self.linear(values)
        step = self._adapters.step
        if step is not None:
            step.add(self._index, values, result)
        return result


class TorchAdapters:
    """Computes adapters by torch; the base of the one that uses Triton."""

    #: ranks are filled up to multiples of this
    rank_multiple: ClassVar[int] = 1

    def __init__(self, dtype: torch.dtype, device: torch.device, max_rank: int) -> None:
        self.targets = AdapterTargets()
        #: step of the running forward; None if no row of it has an adapter
        self.step: AdapterStep | None = None
        #: and its batch
        self.batch: Batch | None = None
        self._dtype = dtype
        self._device = device
        self._max_rank = max_rank
        self._slots: dict[int, PackedAdapter] = {}
        #: index of the layer to logits; None: it is not adapted
        self.head: int | None = None

    def add_head(self, outputs: int, inputs: int, base: Base) -> None:
        """The layer to logits can be adapted, see :meth:`to_logits`; but not by all kernels."""
        self.head = self.targets.add_head(outputs, inputs, base)

    def to_logits(self, batch: Batch, values: torch.Tensor, logits: torch.Tensor) -> None:
        """Add the summands of the layer to logits to those of ``batch.logits_rows``, from its inputs."""
        if self.head is None or self.step is None:
            return
        assert batch.adapters is not None
        tokens = len(batch.input_ids)
        slots = batch.adapters.repeat_interleave(batch.cu_q.diff(), output_size=tokens)[batch.logits_rows]
        groups = [
            Group(adapter, (slots == slot).nonzero()[:, 0])
            for slot in {slot for slot in batch.adapter_slots or () if slot}
            if self.head in (adapter := self._held(slot)).layers
        ]
        _TorchStep(groups).add(self.head, values, logits)

    def with_words(self, batch: Batch, scale: float) -> Features | None:
        """See :func:`~aioinfer.model.adapters.words.with_words`."""
        slots = {slot for slot in batch.adapter_slots or () if slot}
        tables = {slot: words for slot in slots if (words := self._held(slot).words) is not None}
        return with_words(batch, tables, scale) if tables else batch.features

    def linear(self, stored: StoredMatrix, made: Linear) -> Linear:
        """The layer ``made`` of a matrix, with adapters if it can have some."""
        index = self.targets.add(stored)
        return made if index is None else AdaptedLinear(made, self, index)

    def prepare(self, path: Path) -> PackedAdapter:
        files = AdapterFiles.read(path, self.targets.most_bytes(self._max_rank))
        found = self.targets.match(files, self._max_rank)
        words = self.targets.words(files, self._max_rank)
        place = self._dtype, self._device, self.rank_multiple
        return PackedAdapter.pack(
            found, *place, files.fingerprint, rank=files.rank, bound=files.bound, words=words
        )

    def install(self, slot: int, adapter: PreparedAdapter) -> None:
        """Raises ValueError: the slot is taken, or none; ConfigError: other weights have come meanwhile."""
        assert isinstance(adapter, PackedAdapter), "adapters are prepared by the model that computes them"
        if slot < 1 or slot in self._slots:
            raise ValueError(f"slot {slot} cannot take an adapter")
        self.targets.bind(slot, adapter)
        self._slots[slot] = adapter

    def remove(self, slot: int) -> None:
        self._slots.pop(slot, None)
        self.targets.release(slot)

    def replace_weights(self) -> None:
        self.targets.replace_weights()

    @contextlib.contextmanager
    def computing(self, batch: Batch) -> Iterator[None]:
        """The forward of a batch with adapters. Raises ValueError if a slot is empty."""
        self.step = self._step(batch)
        self.batch = None if self.step is None else batch
        try:
            yield
        finally:
            self.step = self.batch = None

    def _step(self, batch: Batch) -> AdapterStep | None:
        groups = self._groups(batch)
        return _TorchStep(groups) if groups else None

    def _groups(self, batch: Batch) -> list[Group]:
        """The adapters of a batch. Raises ValueError if a slot is empty."""
        places: dict[int, list[slice]] = {}
        for run in runs(batch.adapter_slots or (), batch.q_lens):
            places.setdefault(run.slot, []).append(slice(run.first, run.stop))
        self._check(places)
        groups = []
        for slot, slices in places.items():
            where: slice | torch.Tensor = slices[0]
            if len(slices) > 1:
                tokens = [token for each in slices for token in range(each.start, each.stop)]
                where = torch.tensor(tokens, dtype=torch.int64).to(self._device, non_blocking=True)
            groups.append(Group(self._held(slot), where))
        return groups

    def _held(self, slot: int) -> PackedAdapter:
        """The adapter of a slot, whose memory stays until the work that is enqueued by now has been done."""
        adapter = self._slots[slot]
        if self._device.type == "cuda":
            for memory in (adapter.memory, adapter.rescaling, adapter.words):
                if memory is not None:
                    memory.record_stream(torch.cuda.current_stream(self._device))
        return adapter

    def _check(self, slots: Mapping[int, Any]) -> None:
        empty = [slot for slot in slots if slot not in self._slots]
        if empty:
            raise ValueError(f"slot {empty[0]} has no adapter")


class Group(NamedTuple):
    """An adapter of a step, and its tokens: side by side, or int64 [n]."""

    adapter: PackedAdapter
    where: slice | torch.Tensor


class _TorchStep:
    """The adapters of a step as groups of tokens."""

    __slots__ = ("_groups",)

    def __init__(self, groups: list[Group]) -> None:
        self._groups = groups

    def add(self, index: int, values: torch.Tensor, result: torch.Tensor) -> None:
        for adapter, where in self._groups:
            layer = adapter.layers.get(index)
            if layer is None:
                continue
            layer.rescale(result, where)
            low = F.linear(values[where], layer.a)
            for _, first, stop, b, start, scale, _ in layer.parts:
                added = F.linear(low[:, first:stop] * scale, b)
                into = result[:, start : start + len(b)]
                if isinstance(where, slice):
                    into[where] += added
                else:
                    into.index_add_(0, where, added)
