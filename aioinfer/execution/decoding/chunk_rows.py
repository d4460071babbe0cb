"""ChunkRows: what captured steps read of positions that are no decodes: chunks of prompts, verified drafts.

They are others in every step, so all of them are sent in one copy, and then put in their place::

    cells   decodes │ ids │ positions │ KV cells │ cu_q │ kv_len │ logits_rows      as a shape has them
    table   pages of each row                                                       as far as the step's go

The rows of a step are followed by empty ones, and these by one of padding without a context, which has the
positions that are left: so every position belongs to a row, and attention leaves no junk for other layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.execution.decoding.base import Send
from aioinfer.execution.graph_shapes import GraphShape, GraphShapes
from aioinfer.execution.packed import PackedStep

__all__ = ["ChunkRows", "Chunks"]

#: cells to which the beginning of a section is rounded: kernels like round addresses
_ROUND = 4

_Array = TypeVar("_Array", torch.Tensor, "npt.NDArray[np.int64]")


@dataclass(slots=True)
class Chunks(Generic[_Array]):
    """Buffers of one shape, with N decodes, and T positions after them in C rows; int64."""

    #: [1]: how many of the N rows decode
    decodes: _Array
    #: [T]: the token of each position, or that of the relay in the slot ``-id`` if it is negative
    ids: _Array
    positions: _Array
    #: [T]: KV cells
    slot_mapping: _Array
    #: [C + 2]: of C rows and of one of padding, the positions [cu_q[r], cu_q[r + 1]) of the step; they begin
    #: at N
    cu_q: _Array
    #: [C + 1]
    kv_len: _Array
    #: [N + C]: positions of the step whose logits are computed
    logits_rows: _Array

    @classmethod
    def of(cls, cells: _Array, shape: GraphShape) -> Chunks[_Array]:
        """Views of ``cells``, of which those of this shape are the first."""
        views, start = [], 0
        for size in _sizes(shape):
            views.append(cells[start : start + size])
            start += _rounded(size)
        return cls(*views)


def _sizes(shape: GraphShape) -> tuple[int, ...]:
    tokens, rows = shape.tokens, shape.chunks + 1
    return (1, tokens, tokens, tokens, rows + 1, rows, shape.logits)


def _rounded(size: int) -> int:
    return -(-size // _ROUND) * _ROUND


def _num_cells(shape: GraphShape) -> int:
    return sum(map(_rounded, _sizes(shape)))


class ChunkRows:
    """Chunk rows on the device, for steps of all shapes."""

    def __init__(self, shapes: GraphShapes, max_pages: int, device: torch.device) -> None:
        mixed = [shape for shape in shapes if shape.tokens]
        cells, rows = max(map(_num_cells, mixed), default=0), max((each.chunks for each in mixed), default=-1)
        self._cells = torch.zeros(cells, dtype=torch.int64, device=device)
        #: of the row of padding, too
        self._table = torch.zeros(rows + 1, max_pages, dtype=torch.int64, device=device)

    def of(self, shape: GraphShape) -> tuple[Chunks[torch.Tensor], torch.Tensor]:
        """Inputs of a step of this shape, and the pages [C + 1, max_pages]."""
        return Chunks.of(self._cells, shape), self._table[: shape.chunks + 1]

    def clear(self, shape: GraphShape) -> None:
        """Make them those of a step that has none."""
        chunks, _ = self.of(shape)
        self._cells.zero_()
        chunks.cu_q.fill_(shape.rows)
        chunks.cu_q[-1] += shape.tokens

    def update(self, packed: PackedStep, shape: GraphShape, send: Send) -> None:
        """Make them those of a step. Pages that its rows do not reach stay as they are: nothing reads
        them."""
        count, pages = len(packed.q_lens) - packed.num_decodes, packed.num_pages
        used = _num_cells(shape)
        cells = np.zeros(used + count * pages, np.int64)
        _fill(Chunks.of(cells, shape), packed, shape)
        cells[used:] = packed.sections["block_table"]
        sent = send(cells)
        self._cells[:used].copy_(sent[:used])
        self._table[:count, :pages].copy_(sent[used:].view(count, pages))


def _fill(chunks: Chunks[Any], packed: PackedStep, shape: GraphShape) -> None:
    """The cells, which are 0, as the step has them."""
    sections, decodes = packed.sections, packed.num_decodes
    shift = shape.rows - decodes
    ids = sections["input_ids"]
    tokens, rows = len(ids) - decodes, len(packed.q_lens) - decodes
    chunks.decodes[0] = decodes
    chunks.ids[:tokens] = ids[decodes:]
    verified = sections.get("verified")
    if verified is not None:
        slots = sections["slots"][decodes : decodes + len(verified)]
        chunks.ids[verified - decodes] = -slots
    chunks.positions[:tokens] = sections["positions"][decodes:]
    chunks.slot_mapping[:tokens] = sections["slot_mapping"][decodes:]
    chunks.cu_q[: rows + 1] = sections["cu_q"][decodes:] + shift
    chunks.cu_q[rows + 1 : -1] = shape.rows + tokens
    chunks.cu_q[-1] = shape.rows + shape.tokens
    chunks.kv_len[:rows] = sections["kv_len"][decodes:]
    wanted = sections["logits_rows"]
    chunks.logits_rows[: len(wanted)] = np.where(wanted < decodes, wanted, wanted + shift)
