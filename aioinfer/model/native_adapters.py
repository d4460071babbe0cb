"""NativeAdapters: low-rank adapters in the products of native layers; see ``adapters.hpp``."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from aioinfer.checkpoint.adapter import AdapterFiles
from aioinfer.errors import ConfigError
from aioinfer.model.adapters.base import PreparedAdapter
from aioinfer.model.adapters.targets import AdapterTargets, LowRank
from aioinfer.model.adapters.words import with_words
from aioinfer.model.batch import Batch
from aioinfer.model.vision.base import Features
from aioinfer.native.arguments import AdaptedLayer, LowRankTarget
from aioinfer.native.bindings import InvalidArguments
from aioinfer.native.packed import PackedAdapter, Stack
from aioinfer.system.low_priority import at_low_priority

__all__ = ["PARTS", "NativeAdapters", "PreparedNative"]

#: the linear layers of a decoder's layer that can be adapted, in the order of ``adapters.hpp``
PARTS = ("into", "out", "gate_up", "down", "gates", "beside_into", "beside_out")
_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: ranks that are computed together
_RANKS = 16


@dataclass(frozen=True, slots=True)
class PreparedNative:
    """An adapter in the form that native kernels read."""

    rank: int
    num_bytes: int
    fingerprint: str
    packed: PackedAdapter
    #: it was made of the model's weights, and of no use with others
    bound: bool
    #: [vocab_size, hidden], vectors of tokens of its own; None: it has the model's
    words: torch.Tensor | None


class NativeAdapters:
    """The adapters of a native decoder."""

    def __init__(
        self, stack: Stack, targets: AdapterTargets, places: Mapping[int, tuple[int, int]], max_rank: int
    ) -> None:
        """``places``: by the index among ``targets``, a layer of the stack and which of :data:`PARTS`."""
        self._stack, self._targets, self._places, self._max_rank = stack, targets, places, max_rank
        #: vectors of tokens by slot
        self._words: dict[int, torch.Tensor] = {}

    def prepare(self, path: Path) -> PreparedNative:
        files = AdapterFiles.read(path, self._targets.most_bytes(self._max_rank))
        found = self._targets.match(files, self._max_rank)
        size, keep = 0, _Kept()
        layers = []
        for index, entries in found.items():
            if index not in self._places:
                names = " and ".join(target.name for target in self._targets.layers[index].targets)
                raise ConfigError(f"adapter: {names} cannot be adapted by native kernels")
            ranks = [entry for entry in entries if entry is not None]
            layers.append(keep.layer(*self._places[index], ranks))
            size += sum(_padded(each.rank) * each.a.shape[1] + each.b.numel() for each in ranks)
        try:
            packed = at_low_priority(partial(self._stack.adapter, layers))
        except InvalidArguments as error:
            raise ConfigError(f"adapter: {error}") from error
        size *= 4 if self._stack.number == "float32" else 2
        words = self._targets.words(files, self._max_rank)
        if words is not None:
            words = words.to(_TYPES[self._stack.number])
            size += words.nbytes
        return PreparedNative(files.rank, size, files.fingerprint, packed, files.bound, words)

    def install(self, slot: int, adapter: PreparedAdapter) -> None:
        assert isinstance(adapter, PreparedNative)
        self._targets.bind(slot, adapter)
        self._stack.set_adapter(slot, adapter.packed)
        if adapter.words is not None:
            self._words[slot] = adapter.words

    def remove(self, slot: int) -> None:
        self._stack.set_adapter(slot, None)
        self._words.pop(slot, None)
        self._targets.release(slot)

    def with_words(self, batch: Batch, scale: float) -> Features | None:
        """See :func:`~aioinfer.model.adapters.words.with_words`."""
        return with_words(batch, self._words, scale)

    def replace_weights(self) -> None:
        self._targets.replace_weights()


class _Kept(list[object]):
    """Owners of the memory of arguments, until the adapter is packed."""

    def layer(self, layer: int, part: int, ranks: Sequence[LowRank]) -> AdaptedLayer:
        targets = (LowRankTarget * len(ranks))()
        self.append(targets)
        for target, each in zip(targets, ranks, strict=True):
            target.a, target.a_is_bfloat16 = self._numbers(each.a)
            target.b, target.b_is_bfloat16 = self._numbers(each.b)
            target.rank, target.start, target.rows = each.rank, each.start, len(each.b)
            target.scale = each.scale
            if each.rescaling is not None:
                target.rescaling, _ = self._numbers(each.rescaling)
        return AdaptedLayer(layer=layer, part=part, targets=ctypes.addressof(targets), count=len(ranks))

    def _numbers(self, tensor: torch.Tensor) -> tuple[int, bool]:
        """The address of numbers in bfloat16 or float32, and whether in the former."""
        # By numpy: torch would divide the work among threads that the launch thread needs.
        is_bfloat16 = tensor.dtype == torch.bfloat16
        values = tensor.contiguous()
        if not is_bfloat16:
            values = torch.from_numpy(np.ascontiguousarray(values.numpy(), np.float32))
        self.append(values)
        return values.data_ptr(), is_bfloat16


def _padded(rank: int) -> int:
    """Round up to whole groups of ranks; see ``adapters.hpp``."""
    return -(-rank // _RANKS) * _RANKS
