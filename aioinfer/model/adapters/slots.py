"""TorchAdapters: adapters of linear layers, computed by torch and added to the results of the layers.

The result for the tokens of an adapter gets ``scale * (x @ A.T) @ B.T``: two small matrix products for each
adapter of a step. Steps without adapters cost a look at a variable for each layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F

from aioinfer.checkpoint.adapter import AdapterFiles
from aioinfer.model.adapters.base import PreparedAdapter
from aioinfer.model.adapters.packed import PackedAdapter, PackedLayer
from aioinfer.model.adapters.rows import runs
from aioinfer.model.adapters.targets import AdapterTargets
from aioinfer.model.batch import Batch
from aioinfer.model.linear import Linear
from aioinfer.model.weights import StoredMatrix

__all__ = ["AdaptedLinear", "AdapterStep", "TorchAdapters"]


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
        self._dtype = dtype
        self._device = device
        self._max_rank = max_rank
        self._slots: dict[int, PackedAdapter] = {}

    def linear(self, stored: StoredMatrix, made: Linear) -> Linear:
        """The layer ``made`` of a matrix, with adapters if it can have some."""
        index = self.targets.add(stored)
        return made if index is None else AdaptedLinear(made, self, index)

    def prepare(self, path: Path) -> PackedAdapter:
        files = AdapterFiles.read(path, self.targets.most_bytes(self._max_rank))
        found = self.targets.match(files, self._max_rank)
        return PackedAdapter.pack(
            found, self._dtype, self._device, self.rank_multiple, fingerprint=files.fingerprint
        )

    def install(self, slot: int, adapter: PreparedAdapter) -> None:
        """Raises ValueError: the slot is taken, or none."""
        assert isinstance(adapter, PackedAdapter), "adapters are prepared by the model that computes them"
        if slot < 1 or slot in self._slots:
            raise ValueError(f"slot {slot} cannot take an adapter")
        self._slots[slot] = adapter

    def remove(self, slot: int) -> None:
        self._slots.pop(slot, None)

    @contextlib.contextmanager
    def computing(self, batch: Batch) -> Iterator[None]:
        """The forward of a batch with adapters. Raises ValueError if a slot is empty."""
        self.step = self._step(batch)
        try:
            yield
        finally:
            self.step = None

    def _step(self, batch: Batch) -> AdapterStep | None:
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
            groups.append((self._held(slot).layers, where))
        return _TorchStep(groups) if groups else None

    def _held(self, slot: int) -> PackedAdapter:
        """The adapter of a slot, whose memory stays until the work that is enqueued by now has been done."""
        adapter = self._slots[slot]
        if self._device.type == "cuda":
            adapter.memory.record_stream(torch.cuda.current_stream(self._device))
        return adapter

    def _check(self, slots: Mapping[int, Any]) -> None:
        empty = [slot for slot in slots if slot not in self._slots]
        if empty:
            raise ValueError(f"slot {empty[0]} has no adapter")


class _TorchStep:
    """The adapters of a step as groups of tokens."""

    __slots__ = ("_groups",)

    def __init__(self, groups: list[tuple[Mapping[int, PackedLayer], slice | torch.Tensor]]) -> None:
        """The layers of each adapter, and its tokens: side by side, or int64 [n]."""
        self._groups = groups

    def add(self, index: int, values: torch.Tensor, result: torch.Tensor) -> None:
        for layers, where in self._groups:
            layer = layers.get(index)
            if layer is None:
                continue
            low = F.linear(values[where], layer.a)
            for _, first, stop, b, start, scale in layer.parts:
                added = F.linear(low[:, first:stop] * scale, b)
                into = result[:, start : start + len(b)]
                if isinstance(where, slice):
                    into[where] += added
                else:
                    into.index_add_(0, where, added)
