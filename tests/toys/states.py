"""ToyStates: cells of recurrent state that tell whose state they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aioinfer.errors import ConfigError
from aioinfer.scheduling.step import Row

__all__ = ["TaintError", "ToyStates", "number_in"]


_JUNK = -1


class TaintError(AssertionError):
    """A step was about to read memory that is not its own, or was never written."""


def number_in(weights: Any) -> int:
    """The weights of a toy: [("weights", number)]. Raises ConfigError for anything else."""
    match weights:
        case [("weights", int(number))] if type(number) is int and isinstance(weights, list):
            return number
    raise ConfigError("weights: of a toy they are one integer")


class ToyStates:
    """By cell, how many tokens it stands for and their hash. See :mod:`aioinfer.model.state`."""

    def __init__(self, num_slots: int, num_snapshots: int) -> None:
        #: the hash of nothing
        self.beginning = 0
        self.cells = np.full((num_slots + num_snapshots + 1, 2), _JUNK, np.int64)
        #: by slot, what the drafts of its last row were for a state: the hashes behind each
        self.stashes: dict[int, list[int]] = {}

    def check(self, rows: Sequence[Row]) -> None:
        """Raise TaintError if a row writes a cell that another row of the step accesses."""
        writers = {row.state_write: row for row in rows}
        if len(writers) < len(rows):
            raise TaintError("two rows of a step write the same cell of state")
        for row in rows:
            if not 0 < row.state_write < len(self.cells):
                raise TaintError(f"{row.sequence}: writes cell {row.state_write} of state")
            if writers.get(row.state_read, row) is not row:
                raise TaintError(f"{row.sequence}: another row writes the cell of state that it reads")

    def read(self, row: Row, expected: Sequence[int]) -> None:
        """Raise TaintError unless a row starts from the state of its own tokens, whose hashes are
        ``expected``: from that of a cell, and what it replays of its stash."""
        found = self.cells[row.state_read].tolist() if row.state_read else [0, self.beginning]
        at = row.start - row.replays
        if found != [at, expected[at - 1] if at else self.beginning]:
            raise TaintError(f"{row.sequence}: starts from a state that is not of its own {at} tokens")
        if row.replays and self.stashes[row.slot][: row.replays] != [*expected[at : row.start]]:
            raise TaintError(f"{row.sequence}: replays what is not of its own tokens")

    def write(self, row: Row, expected: Sequence[int]) -> None:
        """A row leaves the state in front of its drafts, and what they are; ``expected`` are the hashes of
        its tokens."""
        kept = row.kv_length - len(row.drafts)
        self.cells[row.state_write] = kept, expected[kept - 1]
        self.stashes[row.slot] = [*expected[kept : row.kv_length]]

    def spoil(self, row: Row) -> None:
        """A row leaves junk."""
        self.cells[row.state_write] = _JUNK
        self.stashes[row.slot] = []
