"""Mirror: what captured steps read of their rows, on the device, and what the host knows to be there."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["KEPT", "Mirror"]

#: steps whose results the device keeps: those of the next are computed while the host's copies are under way
KEPT = 4

#: a value that no page table holds
_UNKNOWN = -1


class Mirror:
    """Columns and page tables of rows in one buffer: all changes go to the device in one copy."""

    def __init__(self, num_columns: int, num_rows: int, max_pages: int, device: torch.device) -> None:
        """``num_columns``: cells of all columns together."""
        self._num_columns = num_columns
        self._cells = torch.zeros(num_columns + num_rows * max_pages, dtype=torch.int64, device=device)
        #: int64 [num_columns]
        self.columns = self._cells[:num_columns]
        #: int64 [num_rows, max_pages]
        self.table = self._cells[num_columns:].view(num_rows, max_pages)
        self._known = np.zeros(len(self._cells), np.int64)
        self._known_table = self._known[num_columns:].reshape(num_rows, max_pages)
        #: nothing is known of the columns, which may hold any number
        self._lost = False
        #: of the host, to be written to where the device itself changes columns
        self.known_columns: npt.NDArray[np.int64] = self._known[:num_columns]

    def forget(self) -> None:
        """A step failed: what is on the device is unknown."""
        self._known_table[:] = _UNKNOWN
        self._lost = True

    def update(
        self,
        columns: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int64],
        table: npt.NDArray[np.int64],
        send: Callable[[npt.NDArray[np.int64]], torch.Tensor],
    ) -> bool:
        """Have the device hold these columns, [num_columns], and as the pages of some ``rows`` those of
        ``table``, [len(rows), pages]. False if it did so already. Pages that the table does not reach, and
        those of other rows, stay as they are."""
        cells = np.flatnonzero((self.known_columns != columns) | self._lost)
        pages = table.shape[1]
        # Much faster than finding them in two dimensions.
        other = np.flatnonzero(self._known_table[rows, :pages] != table)
        if not len(cells) and not len(other):
            return False
        values = np.concatenate((columns[cells], table.reshape(-1)[other]))
        at = rows[other // pages] * self._known_table.shape[1] + other % pages
        cells = np.concatenate((cells, self._num_columns + at))
        self._cells.index_copy_(0, *send(np.concatenate((cells, values))).chunk(2))
        self._known[cells] = values
        self._lost = False
        return True
