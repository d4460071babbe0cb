"""Paging: which pages hold the sequence of a slot, and so in which cells the tokens of a step lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from aioinfer.scheduling.step import TableUpdate

__all__ = ["PageTables", "Placement", "Tables"]


@dataclass(frozen=True, slots=True)
class Tables:
    """Page tables of rows as they were at some time, without a copy of all."""

    #: of each row, all pages that its tenant may have, int64; never written to
    rows: Sequence[npt.NDArray[np.int64]]
    #: int64 [R]: what has the same number is the same
    versions: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Placement:
    """Places of the T tokens of R rows; names as in :class:`~aioinfer.model.batch.Batch`, int64 each."""

    #: [T]
    positions: npt.NDArray[np.int64]
    slot_mapping: npt.NDArray[np.int64]
    #: [R + 1]
    cu_q: npt.NDArray[np.int64]
    #: [R]
    kv_len: npt.NDArray[np.int64]
    kv_lens: list[int]
    #: [R, P], or of the rows from some on
    block_table: npt.NDArray[np.int64]


class PageTables:
    """Page tables by slot, as rows bring them: what they do not repeat is remembered."""

    def __init__(self, num_slots: int, max_pages: int, page_size: int) -> None:
        self.page_size = page_size
        #: a tenant's entries beyond its pages name the null page 0
        self._tables = np.zeros((num_slots + 1, max_pages), np.int64)
        #: by slot, what it was when it was last asked for
        self._copies: list[npt.NDArray[np.int64] | None] = [None] * (num_slots + 1)
        self._versions = np.zeros(num_slots + 1, np.int64)
        self._version = 0

    def update(self, new: Iterable[int], changes: Iterable[TableUpdate]) -> None:
        """The slots ``new`` have new tenants, without pages but for those among the changes."""
        for slot in new:
            self._tables[slot] = 0
            self._changed(slot)
        for slot, first, pages in changes:
            if pages:
                self._tables[slot, first : first + len(pages)] = pages
                self._changed(slot)

    def _changed(self, slot: int) -> None:
        self._version += 1
        self._versions[slot] = self._version
        self._copies[slot] = None

    def of(self, slots: npt.NDArray[np.int64]) -> Tables:
        """Present tables of slots. Copies those that have changed since they were last asked for."""
        rows = []
        for slot in slots.tolist():
            row = self._copies[slot]
            if row is None:
                row = self._copies[slot] = self._tables[slot].copy()
            rows.append(row)
        return Tables(rows, self._versions[slots])

    def place(
        self,
        slots: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        q_len: npt.NDArray[np.int64] | None,
        *,
        first: int = 0,
    ) -> Placement:
        """Places of one or more rows; ``q_len`` is None where all have length 1. ``first``: of the rows whose
        tables are wanted."""
        size = self.page_size
        kv_len = starts + (1 if q_len is None else q_len)
        kv_lens = kv_len.tolist()
        tables = self._tables[slots[first:], : -(-max(kv_lens[first:], default=0) // size)]
        cu_q = np.arange(len(slots) + 1)
        rows, positions = cu_q[:-1], starts
        if q_len is not None:
            rows = np.repeat(rows, q_len)
            cu_q = np.concatenate(((0,), np.cumsum(q_len)))
            # Position of each token: its row's start plus its offset in the row.
            positions = np.arange(len(rows)) - cu_q[rows] + starts[rows]
        cells = self.cells(slots[rows], positions)
        return Placement(positions, cells, cu_q, kv_len, kv_lens, tables)

    def cells(self, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Cells of single positions."""
        size = self.page_size
        return self._tables[slots, positions // size] * size + positions % size
