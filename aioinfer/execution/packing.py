"""Packing: a Step becomes one flat int64 buffer, and whatever its decoding needs besides.

It runs on the loop's thread right after planning, so that it overlaps with the step on the device; the
launch thread then makes one tensor of the buffer (one host-to-device copy on CUDA) and splits it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from aioinfer.execution.decoding.base import RowPacker
from aioinfer.execution.paging import PageTables, Placement, Tables
from aioinfer.scheduling.step import MultiStepBudget, Step

if TYPE_CHECKING:
    import torch

__all__ = ["Layout", "PackedStep", "Packer", "Sections"]


class Sections:
    """Named int64 arrays that travel to the device as one buffer: the one place that knows their order."""

    __slots__ = ("_names", "_sizes", "ints")

    def __init__(self, arrays: Mapping[str, npt.NDArray[np.int64]]) -> None:
        """``arrays``: one-dimensional."""
        self._names = tuple(arrays)
        self._sizes = [len(array) for array in arrays.values()]
        self.ints: npt.NDArray[np.int64] = np.concatenate(list(arrays.values()))

    def __getitem__(self, name: str) -> npt.NDArray[np.int64]:
        """One section, a view."""
        at = self._names.index(name)
        start = sum(self._sizes[:at])
        return self.ints[start : start + self._sizes[at]]

    def split(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Views of the sections of ``tensor``, which holds what ``ints`` does."""
        return dict(zip(self._names, tensor.split(self._sizes), strict=True))


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the R rows of a step are, generating ones first."""

    #: int64 [R]
    slots: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    #: int64 [R]: positions of each row; None where all have one
    q_len: npt.NDArray[np.int64] | None
    placement: Placement
    #: captured decodes may compute this step
    captured: bool


@dataclass(slots=True)
class PackedStep:
    """A step as arrays. Sizes: T tokens, R rows, P pages of the longest row.

    ``sections`` holds input_ids[T], positions[T], slot_mapping[T], cu_q[R + 1], kv_len[R], slots[R] and
    block_table[R * P], as in :class:`~aioinfer.model.batch.Batch`, and behind them the sections of the
    decoding.
    """

    sections: Sections
    step_id: int
    #: rows of one position whose token waits in the relay; they come first
    num_decodes: int
    num_pages: int
    q_lens: list[int]
    kv_lens: list[int]
    #: what the decoding packed besides its sections
    work: Any
    #: instead of ``block_table``, which has no rows then, for a step that captured decodes may compute
    tables: Tables | None = None
    multi_step: MultiStepBudget | None = None

    @property
    def decodes_only(self) -> bool:
        """Every row computes one token, which waits in the relay, and samples the next."""
        return self.num_decodes == len(self.q_lens)


class Packer:
    """Keeps, by slot, what rows do not repeat: page tables here, parameters in ``rows``.

    ``graph_rows``: steps of so many decodes and nothing else are computed by captured decodes, which know
    most of the page tables already.
    """

    __slots__ = ("_graph_rows", "_rows", "_tables")

    def __init__(
        self, rows: RowPacker, num_slots: int, max_pages: int, page_size: int, graph_rows: int = 0
    ) -> None:
        self._rows = rows
        self._graph_rows = graph_rows
        self._tables = PageTables(num_slots, max_pages, page_size)

    def pack(self, step: Step) -> PackedStep:
        """Pack steps in the order of their ids, each once."""
        generating, prefilling = step.generating, step.prefilling
        new = dict(generating.new_requests)
        new |= {row.slot: row.new_request for row in prefilling if row.new_request is not None}
        if new:
            self._rows.admit(new)
        self._tables.update(new, (*generating.tables, *(row.table_update for row in prefilling)))
        layout = self._layout(step)
        placement = layout.placement
        own, work = self._rows.pack(step, layout)
        return PackedStep(
            sections=Sections(
                {
                    "input_ids": self._input_ids(step, placement.cu_q),
                    "positions": placement.positions,
                    "slot_mapping": placement.slot_mapping,
                    "cu_q": placement.cu_q,
                    "kv_len": placement.kv_len,
                    "slots": layout.slots,
                    "block_table": placement.block_table.reshape(-1),
                    **own,
                }
            ),
            step_id=step.id,
            num_decodes=len(generating) if generating.lengths is None else 0,
            num_pages=placement.block_table.shape[1],
            q_lens=[1] * len(layout.slots) if layout.q_len is None else layout.q_len.tolist(),
            kv_lens=placement.kv_lens,
            work=work,
            tables=self._tables.of(layout.slots) if layout.captured else None,
            multi_step=step.multi_step,
        )

    def _layout(self, step: Step) -> Layout:
        generating, prefilling = step.generating, step.prefilling
        slots, starts, q_len = generating.slots, generating.starts, generating.lengths
        if prefilling:
            first = np.ones(len(slots), np.int64) if q_len is None else q_len
            slots = np.concatenate((slots, [row.slot for row in prefilling]))
            starts = np.concatenate((starts, [row.start for row in prefilling]))
            q_len = np.concatenate((first, [row.length for row in prefilling]))
        captured = q_len is None and len(slots) <= self._graph_rows
        placement = self._tables.place(slots, starts, q_len, with_tables=not captured)
        return Layout(slots, starts, q_len, placement, captured)

    def _input_ids(self, step: Step, cu_q: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Known ids in place; elsewhere the slot on the device has them, or nothing."""
        ids = np.full(step.num_tokens, self._rows.unknown_id, np.int64)
        for at, row in enumerate(step.prefilling, step.num_generating):
            first = int(cu_q[at])
            ids[first : first + len(row.ids)] = row.ids
        return ids
