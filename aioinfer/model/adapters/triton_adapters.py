"""TritonAdapters: adapters of linear layers by two Triton kernels, for steps with any number of adapters.

The tokens of a step that have adapters are put into blocks of up to 16 neighbours with one adapter; others
have no block. For each layer that an adapter of the step changes::

    low[token, target]  = x . A^T, in parts of the inner dimension     programs (block, target x ranks, part)
    result[token]      += sum over targets of (scale * low) . B^T      programs (block, columns)

The shrinking and expanding products are those of Punica (Chen et al., arXiv 2310.18547) and S-LoRA (Sheng et
al., arXiv 2311.03285). Here the matrices of an adapter stay where they were loaded, and a table has their
addresses by slot and target, so that to install an adapter is to write a row of the table.

Ranks are filled up to multiples of 16 with zeros. The tiles of a product, and the order of its sums, follow
from the layer alone; rows of a tile are independent. Hence what a token gets depends on its own inputs and
its own adapter, to the bit. No two programs write to the same address.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from aioinfer.model.adapters.base import PreparedAdapter
from aioinfer.model.adapters.packed import PackedAdapter
from aioinfer.model.adapters.rows import blocks, runs
from aioinfer.model.adapters.slots import AdapterStep, Group, TorchAdapters
from aioinfer.model.adapters.targets import Base
from aioinfer.model.attention.triton_common import INTERPRETED, rounded
from aioinfer.model.batch import Batch

__all__ = ["TritonAdapters"]

#: tokens of a block, and ranks of a tile: the least that a matrix unit multiplies
_TILE = 16
#: columns of results that a program computes
_COLUMNS = 64
#: inner dimensions that a part has at least, and the most parts
_PART, _PARTS = 512, 4


@triton.jit(do_not_specialize=["at", "width", "tokens", "ranks"])
def _shrink_kernel(
    x: tl.tensor, low: tl.tensor, block_list: tl.tensor, table: tl.tensor,
    at: tl.tensor, width: tl.tensor, tokens: tl.tensor, ranks: tl.tensor, stride_x: tl.tensor,
    TARGETS: tl.constexpr, SIZE: tl.constexpr, PART: tl.constexpr,
    TILE: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """TILE products of a block's tokens with rows of A, over PART inner dimensions. Grid (blocks, TARGETS *
    tiles of ranks, parts).

    x is [tokens, SIZE], low float32 [parts, tokens, TARGETS, ranks]. The table has ``width`` targets for each
    slot, of which those of this layer begin at ``at``.
    """
    slot = tl.load(block_list + tl.program_id(0) * 3).to(tl.int64)
    first = tl.load(block_list + tl.program_id(0) * 3 + 1).to(tl.int64)
    stop = tl.load(block_list + tl.program_id(0) * 3 + 2)
    target = tl.program_id(1) % TARGETS
    rank = tl.program_id(1) // TARGETS * TILE
    entry = table + (slot * width + at + target) * 3
    if rank >= tl.load(entry + 2):
        return
    a = tl.load(entry).to(tl.pointer_type(x.dtype.element_ty))
    a = tl.multiple_of(a, 16)
    lane = tl.arange(0, TILE)
    token = first + lane
    # Tokens out of range repeat the first one, and are not stored.
    origins = x + tl.where(token < stop, token, first) * stride_x
    rows = a + (rank + lane) * SIZE
    begin = tl.program_id(2) * PART
    acc = tl.zeros([TILE, TILE], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + PART, SIZE), BLOCK_K):
        inner = start + tl.arange(0, BLOCK_K)
        if SIZE % BLOCK_K == 0:
            tile = tl.load(origins[:, None] + inner[None, :])
            w = tl.load(rows[:, None] + inner[None, :])
        else:
            tile = tl.load(origins[:, None] + inner[None, :], mask=(inner < SIZE)[None, :], other=0.0)
            w = tl.load(rows[:, None] + inner[None, :], mask=(inner < SIZE)[None, :], other=0.0)
        if WIDEN:
            tile = tile.to(tl.float32)
            w = w.to(tl.float32)
        acc = tl.dot(tile, tl.trans(w), acc, input_precision="ieee")
    to = low + ((tl.program_id(2).to(tl.int64) * tokens + token) * TARGETS + target) * ranks + rank
    tl.store(to[:, None] + lane[None, :], acc, mask=(token < stop)[:, None])


@triton.jit(do_not_specialize=["at", "width", "tokens", "ranks"])
def _expand_kernel(
    low: tl.tensor, result: tl.tensor, block_list: tl.tensor, table: tl.tensor, scales: tl.tensor,
    spans: tl.tensor, at: tl.tensor, width: tl.tensor, tokens: tl.tensor, ranks: tl.tensor,
    TARGETS: tl.constexpr, OUTPUTS: tl.constexpr, PARTS: tl.constexpr,
    TILE: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRETED: tl.constexpr,
) -> None:  # fmt: skip
    """BLOCK_N columns of a block's tokens. Grid (blocks, column blocks).

    result is [tokens, OUTPUTS]; target t has columns [spans[t, 0], spans[t, 1]) of it, which may be some of
    another's, too. The sum over parts is rounded to the type of the result before it is multiplied with B.
    """
    slot = tl.load(block_list + tl.program_id(0) * 3).to(tl.int64)
    first = tl.load(block_list + tl.program_id(0) * 3 + 1).to(tl.int64)
    stop = tl.load(block_list + tl.program_id(0) * 3 + 2)
    lane = tl.arange(0, TILE)
    token = first + lane
    valid = token < stop
    leftmost = tl.program_id(1) * BLOCK_N
    column = leftmost + tl.arange(0, BLOCK_N)
    acc = tl.zeros([TILE, BLOCK_N], tl.float32)
    changed = 0
    for target in tl.static_range(TARGETS):
        entry = slot * width + at + target
        rank = tl.load(table + entry * 3 + 2)
        begin = tl.load(spans + (at + target) * 2)
        end = tl.load(spans + (at + target) * 2 + 1)
        if (rank > 0) & (begin < leftmost + BLOCK_N) & (end > leftmost):
            changed = 1
            b = tl.load(table + entry * 3 + 1).to(tl.pointer_type(result.dtype.element_ty))
            b = tl.multiple_of(b, 16)
            scale = tl.load(scales + entry)
            inside = (column >= begin) & (column < end)
            rows = b + tl.where(inside, column - begin, 0) * rank
            for start in tl.range(0, rank, TILE):
                product = tl.zeros([TILE, TILE], tl.float32)
                for part in tl.static_range(PARTS):
                    origin = low + ((part * tokens + token) * TARGETS + target) * ranks + start
                    product += tl.load(origin[:, None] + lane[None, :], mask=valid[:, None], other=0.0)
                w = tl.load(rows[:, None] + (start + lane)[None, :], mask=inside[:, None], other=0.0)
                product = rounded(product * scale, w, INTERPRETED)
                if INTERPRETED:
                    w = w.to(tl.float32)
                else:
                    product = product.to(w.dtype)
                acc = tl.dot(product, tl.trans(w), acc, input_precision="ieee")
    if changed == 0:
        return
    to = result + token[:, None] * OUTPUTS + column[None, :]
    wanted = valid[:, None] & (column < OUTPUTS)[None, :]
    old = tl.load(to, mask=wanted, other=0.0)
    new = rounded(old.to(tl.float32) + acc, old, INTERPRETED)
    tl.store(to, new.to(old.dtype), mask=wanted)


@dataclass(frozen=True, slots=True)
class _TabledAdapter(PackedAdapter):
    """A packed adapter with its row of the table."""

    #: int64 [targets, 3]: addresses of A and B, rank; 0 for targets that it does not change
    entries: npt.NDArray[np.int64]
    #: [targets]
    scales: npt.NDArray[np.float32]


class _Tables(NamedTuple):
    """The tables of all adapters, as the kernels read them."""

    #: int64 [slots, targets, 3], by slot
    entries: torch.Tensor
    #: float32 [slots, targets]
    scales: torch.Tensor
    #: int64 [targets, 2], of the outputs of their layers
    spans: torch.Tensor


class TritonAdapters(TorchAdapters):
    """Computes adapters by Triton."""

    rank_multiple: ClassVar[int] = _TILE

    def __init__(self, dtype: torch.dtype, device: torch.device, max_rank: int) -> None:
        super().__init__(dtype, device, max_rank)
        self._installed: dict[int, _TabledAdapter] = {}
        #: on the device; None: adapters have come or gone since
        self._tables: _Tables | None = None

    @cached_property
    def _starts(self) -> list[int]:
        """Index of the first target of each layer among those of all layers; and their number."""
        return [0, *itertools.accumulate(len(layer.targets) for layer in self.targets.layers)]

    def prepare(self, path: Path) -> PackedAdapter:
        packed, starts = super().prepare(path), self._starts
        entries, scales = np.zeros((starts[-1], 3), np.int64), np.zeros(starts[-1], np.float32)
        for index, layer in packed.layers.items():
            for part in layer.parts:
                at = starts[index] + part.target
                entries[at] = layer.a[part.first].data_ptr(), part.b.data_ptr(), part.stop - part.first
                scales[at] = part.scale
        fields = {field.name: getattr(packed, field.name) for field in dataclasses.fields(packed)}
        return _TabledAdapter(**fields, entries=entries, scales=scales)

    def add_head(self, outputs: int, inputs: int, base: Base) -> None:
        """Do nothing: no kernel has the tokens of logits in blocks."""

    def install(self, slot: int, adapter: PreparedAdapter) -> None:
        super().install(slot, adapter)
        assert isinstance(adapter, _TabledAdapter)
        self._installed[slot] = adapter
        self._tables = None

    def remove(self, slot: int) -> None:
        super().remove(slot)
        # Nothing reads the row of an empty slot.
        self._installed.pop(slot, None)

    def _step(self, batch: Batch) -> AdapterStep | None:
        found = blocks(runs(batch.adapter_slots or (), batch.q_lens), _TILE)
        slots = {block.slot: None for block in found}
        self._check(slots)
        if not found:
            return None
        adapters = [self._held(slot) for slot in slots]
        block_list = torch.tensor(found, dtype=torch.int32).to(self._device, non_blocking=True)
        if self._tables is None:
            self._tables = self._make_tables()
        rescaling = any(adapter.rescales for adapter in adapters)
        groups = [each for each in self._groups(batch) if each.adapter.rescales] if rescaling else []
        return _TritonStep(self, adapters, block_list, self._tables, groups)

    def _make_tables(self) -> _Tables:
        """Made anew, not changed: steps that run may read the old ones."""
        count, targets = max(self._installed) + 1, self._starts[-1]
        entries, scales = np.zeros((count, targets, 3), np.int64), np.zeros((count, targets), np.float32)
        for slot, adapter in self._installed.items():
            entries[slot], scales[slot] = adapter.entries, adapter.scales
        spans = [(target.start, target.stop) for layer in self.targets.layers for target in layer.targets]
        tensors = torch.from_numpy(entries), torch.from_numpy(scales), torch.tensor(spans, dtype=torch.int64)
        return _Tables(*(tensor.to(self._device, non_blocking=True) for tensor in tensors))

    def place(self, index: int) -> tuple[int, int, int]:
        """Index of a layer's first target among those of all layers, their number, and the number of all."""
        start, stop = self._starts[index : index + 2]
        return start, stop - start, self._starts[-1]


class _TritonStep:
    """The adapters of a step as blocks of tokens."""

    __slots__ = ("_adapters", "_block_list", "_changed", "_ranks", "_rescaling", "_tables")

    def __init__(
        self,
        adapters: TritonAdapters,
        present: Sequence[PackedAdapter],
        block_list: torch.Tensor,
        tables: _Tables,
        rescaling: Sequence[Group],
    ) -> None:
        """``present``: the adapters that tokens have; ``block_list``: int32 [blocks, 3], the slot of each,
        its first token, and the end of its tokens; ``rescaling``: those of them that rescale results."""
        self._adapters = adapters
        self._block_list = block_list
        self._tables = tables
        self._rescaling = rescaling
        #: layers that an adapter changes
        self._changed = frozenset().union(*(adapter.layers for adapter in present))
        #: tiles of the largest rank
        self._ranks = -(-max(adapter.rank for adapter in present) // _TILE)

    def add(self, index: int, values: torch.Tensor, result: torch.Tensor) -> None:
        if index not in self._changed:
            return
        for adapter, where in self._rescaling:
            if (layer := adapter.layers.get(index)) is not None:
                layer.rescale(result, where)
        at, targets, width = self._adapters.place(index)
        values = values if values.stride(1) == 1 else values.contiguous()
        (tokens, size), outputs = values.shape, result.shape[1]
        block_k = 32 if values.dtype.itemsize == 4 else 128
        part = -(-max(_PART, -(-size // _PARTS)) // block_k) * block_k
        parts, blocks_, ranks = -(-size // part), len(self._block_list), self._ranks * _TILE
        low = torch.empty(parts, tokens, targets, ranks, dtype=torch.float32, device=values.device)
        entries, scales, spans = self._tables
        _shrink_kernel[(blocks_, targets * self._ranks, parts)](
            values, low, self._block_list, entries, at, width, tokens, ranks, values.stride(0),
            TARGETS=targets, SIZE=size, PART=part, TILE=_TILE, BLOCK_K=block_k, WIDEN=INTERPRETED,
            num_warps=4, num_stages=3, enable_fp_fusion=True,
        )  # fmt: skip
        _expand_kernel[(blocks_, -(-outputs // _COLUMNS))](
            low, result, self._block_list, entries, scales, spans, at, width, tokens, ranks,
            TARGETS=targets, OUTPUTS=outputs, PARTS=parts, TILE=_TILE, BLOCK_N=_COLUMNS,
            INTERPRETED=INTERPRETED, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
