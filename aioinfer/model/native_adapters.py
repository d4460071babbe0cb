"""NativeAdapters: low-rank adapters in the products of native layers; see ``adapters.hpp``."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.checkpoint.adapter import AdapterFiles
from aioinfer.errors import ConfigError
from aioinfer.model.adapters.base import PreparedAdapter
from aioinfer.model.adapters.targets import AdapterTargets, LowRank
from aioinfer.native.adapter_arguments import AdaptArguments, LowRankTarget
from aioinfer.native.packed import PackedAdapter, Stack

__all__ = ["PARTS", "NativeAdapters", "PreparedNative"]

#: the linear layers of a decoder's layer that can be adapted, in the order of ``adapters.hpp``
PARTS = ("into", "out", "gate_up", "down", "gates")


@dataclass(frozen=True, slots=True)
class PreparedNative:
    """See :class:`~aioinfer.model.adapters.base.PreparedAdapter`."""

    rank: int
    num_bytes: int
    packed: PackedAdapter


class NativeAdapters:
    """See :class:`~aioinfer.model.adapters.base.AdapterSlots`."""

    def __init__(
        self, stack: Stack, targets: AdapterTargets, places: Mapping[int, tuple[int, int]], max_rank: int
    ) -> None:
        """``places``: by the index among ``targets``, a layer of the stack and which of :data:`PARTS`."""
        self._stack, self._targets, self._places, self._max_rank = stack, targets, places, max_rank

    def prepare(self, path: Path) -> PreparedNative:
        """See :class:`~aioinfer.model.adapters.base.AdapterSlots`."""
        files = AdapterFiles.read(path)
        found = self._targets.match(files, self._max_rank)
        size, keep = 0, _Kept()
        parts = []
        for index, entries in found.items():
            if index not in self._places:
                names = " and ".join(target.name for target in self._targets.layers[index].targets)
                raise ConfigError(f"adapter: {names} cannot be adapted by native kernels")
            layer, part = self._places[index]
            ranks = [entry for entry in entries if entry is not None]
            parts.append(keep.arguments(layer, part, ranks))
            size += sum(each.a.numel() + each.b.numel() for each in ranks)
        packed = self._stack.adapter(parts)
        return PreparedNative(files.rank, size * (4 if self._stack.number == "float32" else 2), packed)

    def install(self, slot: int, adapter: PreparedAdapter) -> None:
        """See :class:`~aioinfer.model.adapters.base.AdapterSlots`."""
        assert isinstance(adapter, PreparedNative)
        self._stack.set_adapter(slot, adapter.packed)

    def remove(self, slot: int) -> None:
        """See :class:`~aioinfer.model.adapters.base.AdapterSlots`."""
        self._stack.set_adapter(slot, None)


class _Kept(list[object]):
    """What arguments refer to, until the adapter is packed."""

    def arguments(self, layer: int, part: int, ranks: Sequence[LowRank]) -> AdaptArguments:
        targets = (LowRankTarget * len(ranks))()
        self.append(targets)
        for target, each in zip(targets, ranks, strict=True):
            target.a, target.b = self._floats(each.a), self._floats(each.b)
            target.rank, target.start, target.rows = each.rank, each.start, len(each.b)
            target.scale = each.scale
        return AdaptArguments(
            decoder=None,
            adapter=None,
            layer=layer,
            part=part,
            targets=ctypes.addressof(targets),
            count=len(ranks),
        )

    def _floats(self, tensor: torch.Tensor) -> int:
        """The address of a copy in float32. By numpy: torch would divide the work among threads that the
        launch thread needs."""
        values: npt.NDArray[np.float32]
        if tensor.dtype == torch.bfloat16:
            bits = tensor.contiguous().view(torch.int16).numpy().view(np.uint16)
            values = (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.ascontiguousarray(tensor.numpy(), np.float32)
        self.append(values)
        return values.ctypes.data
