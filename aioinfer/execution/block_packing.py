"""Packing of steps of a diffusion model: rows of known tokens and of blocks become one flat int64 buffer.

As :mod:`aioinfer.execution.packing` does for tokens, on the loop's thread and before the launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from aioinfer.diffusion.record import BlockRecords
from aioinfer.diffusion.registry import algorithm_class, algorithm_names
from aioinfer.diffusion.state import BlockState
from aioinfer.execution.paging import PageTables, Placement
from aioinfer.params import DiffusionParams
from aioinfer.scheduling.step import Admission, MultiStepBudget, Row, Step

__all__ = ["BLOCK_SECTIONS", "AlgorithmRows", "BlockPacked", "BlockPacker", "Tenant", "block_records"]

#: what ``BlockPacked.ints`` holds, one after the other
BLOCK_SECTIONS = (
    *("input_ids", "positions", "slot_mapping", "cu_q", "kv_len", "block_table"),
    *("slots", "targets", "pairs", "block_tokens", "begun_slots", "begun_records"),
)


@dataclass(frozen=True, slots=True)
class AlgorithmRows:
    """Block rows [first, last) of a step have this algorithm."""

    algorithm: str
    first: int
    last: int
    #: their slots, for the host to tell one group from another; None: it does not know them
    key: bytes | None
    #: some row has a temperature; some row that has one has a filter, too
    drawn: bool
    filtered: bool


@dataclass(frozen=True, slots=True)
class Tenant:
    """A request has taken a slot: what its algorithm must know of it."""

    slot: int
    admission: Admission
    params: DiffusionParams


@dataclass(slots=True)
class BlockPacked:
    """A step as arrays. Sizes: T tokens, R rows, P pages of the longest row, K rows that have blocks, of B
    positions, A requests that take a slot, W words of a record.

    ``ints`` holds input_ids[T], positions[T], slot_mapping[T], cu_q[R + 1], kv_len[R] and block_table[R * P];
    of rows that have blocks, by algorithm: slots[K]; targets[K], where the row's last block begins; pairs[K],
    whether there are two, 0 or 1; and block_tokens[K * B], the tokens of the slot's block. Then
    begun_slots[A] and begun_records[A * W], see :class:`~aioinfer.diffusion.record.BlockRecords`.

    ``input_ids`` has the mask id wherever the host does not know.
    """

    ints: npt.NDArray[np.int64]
    #: length of each section
    sizes: tuple[int, ...]
    step_id: int
    num_pages: int
    q_lens: list[int]
    kv_lens: list[int]
    #: index of the row of each block row
    rows: list[int]
    groups: list[AlgorithmRows]
    tenants: list[Tenant]
    #: some row may go on to another block than its slot's
    may_turn: bool
    #: blocks of a step that has nothing else, 0 if it has
    num_rounds: int
    horizon: MultiStepBudget | None

    def section(self, name: str) -> npt.NDArray[np.int64]:
        """One of ``BLOCK_SECTIONS``, flat."""
        at = BLOCK_SECTIONS.index(name)
        start = sum(self.sizes[:at])
        return self.ints[start : start + self.sizes[at]]


def block_records(block_size: int, mask_id: int) -> BlockRecords:
    """Records that can hold the counters of every algorithm there is."""
    most = max(len(algorithm_class(name).counters) for name in algorithm_names())
    return BlockRecords(block_size, mask_id, most)


class BlockPacker:
    """Keeps, by slot, what rows do not repeat: page tables, and how their tenant's blocks are denoised."""

    __slots__ = ("_algorithm", "_drawn", "_filtered", "_mask_id", "_reached", "_records", "_tables")

    def __init__(self, num_slots: int, max_pages: int, page_size: int, block_size: int, mask_id: int) -> None:
        self._tables = PageTables(num_slots, max_pages, page_size)
        self._records = block_records(block_size, mask_id)
        self._mask_id = mask_id
        #: number of the algorithm in alphabetical order
        self._algorithm = np.zeros(num_slots + 1, np.int64)
        self._drawn = np.zeros(num_slots + 1, np.bool_)
        self._filtered = np.zeros(num_slots + 1, np.bool_)
        #: the slot's block does not begin before this position
        self._reached = np.zeros(num_slots + 1, np.int64)

    def pack(self, step: Step) -> BlockPacked:
        """Pack steps in the order of their ids, each once."""
        rows = step.prefills
        tenants: list[Tenant] = []
        begun: list[npt.NDArray[np.int64]] = []
        for row in rows:
            if row.admission is not None:
                tenants.append(self._admit(row, row.admission))
                begun.append(self._begin(row, row.admission))
        self._tables.update(rows)
        slots, starts, q_len, blocks = (
            np.asarray(column, np.int64)
            for column in zip(*((row.slot, row.start, row.length, row.blocks) for row in rows), strict=True)
        )
        placement = self._tables.place(slots, starts, q_len)
        # Rows of one algorithm next to each other, and for each of their tensors that is a slice.
        order = np.flatnonzero(blocks)
        order = order[np.argsort(self._algorithm[slots[order]], kind="stable")]
        size = self._records.size
        own, pairs = slots[order], blocks[order] - 1
        targets = placement.kv_len[order] - size
        first = placement.cu_q[order + 1] - blocks[order] * size
        may_turn = bool((self._reached[own] < targets).any())
        self._reached[own] = targets - pairs * size
        sections = (
            self._input_ids(rows, placement),
            placement.positions,
            placement.slot_mapping,
            placement.cu_q,
            placement.kv_len,
            placement.block_table.reshape(-1),
            own,
            targets,
            pairs,
            (first[:, None] + np.arange(size)).reshape(-1),
            np.asarray([tenant.slot for tenant in tenants], np.int64),
            np.concatenate(begun) if begun else _NONE,
        )
        return BlockPacked(
            ints=np.concatenate(sections),
            sizes=tuple(len(section) for section in sections),
            step_id=step.id,
            num_pages=placement.block_table.shape[1],
            q_lens=q_len.tolist(),
            kv_lens=placement.kv_lens,
            rows=order.tolist(),
            groups=self._groups(own),
            tenants=tenants,
            may_turn=may_turn,
            num_rounds=int(blocks.sum()) if (blocks * size == q_len).all() else 0,
            horizon=step.horizon,
        )

    def _input_ids(self, rows: Sequence[Row], placement: Placement) -> npt.NDArray[np.int64]:
        ids = np.full(len(placement.positions), self._mask_id, np.int64)
        for row, at in zip(rows, placement.cu_q.tolist(), strict=False):
            if row.ids is not None:
                ids[at : at + len(row.ids)] = row.ids
        return ids

    def _groups(self, slots: npt.NDArray[np.int64]) -> list[AlgorithmRows]:
        """Of block rows that are in the order of their algorithms."""
        numbers = self._algorithm[slots]
        edges = [0, *(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(slots)]
        drawn, filtered = self._drawn[slots], self._filtered[slots]
        return [
            AlgorithmRows(
                algorithm_names()[numbers[first]],
                first,
                last,
                slots[first:last].tobytes(),
                bool(drawn[first:last].any()),
                bool(filtered[first:last].any()),
            )
            for first, last in pairwise(edges)
            if first < last
        ]

    def _admit(self, row: Row, admission: Admission) -> Tenant:
        slot, params = row.slot, admission.params
        diffusion = params.diffusion or DiffusionParams()
        self._algorithm[slot] = algorithm_names().index(diffusion.algorithm)
        self._drawn[slot] = drawn = params.temperature > 0
        self._filtered[slot] = drawn and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
        return Tenant(slot, admission, diffusion)

    def _begin(self, row: Row, admission: Admission) -> npt.NDArray[np.int64]:
        """The record of the block that the request begins with, or goes on with."""
        size, prompt = self._records.size, admission.prompt_ids
        start = (len(prompt) + len(admission.output_ids)) // size * size
        state = admission.resume
        if state is None:
            state = BlockState.unknown(start, prompt[start:], size, self._mask_id)
        self._reached[row.slot] = state.start
        return self._records.encode(state, len(prompt))


_NONE = np.empty(0, np.int64)
