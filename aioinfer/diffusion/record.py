"""Records: everything that is remembered of a block, in one row of 64-bit words.

A round takes the records of its rows with one operation, works on views of them, puts them back with another
and sends them to the host with a third, whatever columns there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.diffusion.block import Block
from aioinfer.diffusion.rows import Rows
from aioinfer.diffusion.state import BlockState

__all__ = ["BlockRecords", "WordRows"]

_WORD = 8
#: columns in the order of BlockState's fields
_STATE = (
    *("starts", "ids", "known", "written_in", "logprobs", "rounds", "done", "changed", "failed"),
    "private",
)
_TORCH = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}


@dataclass(frozen=True, slots=True)
class _Column:
    dtype: str
    #: values of a row; None for one that has no dimension of its own
    count: int | None
    first_word: int
    words: int


class WordRows:
    """Columns of several types, laid out in rows of int64 words."""

    __slots__ = ("_columns", "words")

    def __init__(self, columns: Mapping[str, tuple[str, int | None]]) -> None:
        """``columns``: by name, the type (int64, float32 or bool) and how many values a row has of it."""
        self._columns: dict[str, _Column] = {}
        self.words = 0
        for name, (dtype, count) in columns.items():
            words = -(-(1 if count is None else count) * np.dtype(dtype).itemsize // _WORD)
            self._columns[name] = _Column(dtype, count, self.words, words)
            self.words += words

    def first_word(self, name: str) -> int:
        """Where a column begins."""
        return self._columns[name].first_word

    def views(self, table: torch.Tensor) -> Rows:
        """The columns of a table, [R, words] int64: the same memory, [R] or [R, count] each."""
        found: Rows = {}
        for name, column in self._columns.items():
            part = table[:, column.first_word : column.first_word + column.words]
            if column.dtype != "int64":
                part = part.view(_TORCH[column.dtype])
            found[name] = part[:, 0] if column.count is None else part[:, : column.count]
        return found

    def arrays(self, table: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """Likewise on the host."""
        found: dict[str, npt.NDArray[Any]] = {}
        for name, column in self._columns.items():
            part = table[:, column.first_word : column.first_word + column.words]
            values: npt.NDArray[Any] = part if column.dtype == "int64" else part.view(column.dtype)
            found[name] = values[:, 0] if column.count is None else values[:, : column.count]
        return found


class BlockRecords:
    """The record of a :class:`~aioinfer.diffusion.block.Block` and of its algorithm's counters."""

    __slots__ = ("_rows", "blank", "num_counters", "size", "start_word", "words")

    def __init__(self, size: int, mask_id: int, num_counters: int) -> None:
        """``num_counters``: the most that an algorithm has."""
        self.size = size
        self.num_counters = num_counters
        self._rows = WordRows(
            {
                "ids": ("int64", size),
                "written_in": ("int64", size),
                "starts": ("int64", None),
                "rounds": ("int64", None),
                "counters": ("int64", num_counters),
                "logprobs": ("float32", size),
                "known": ("bool", size),
                "editable": ("bool", size),
                "done": ("bool", None),
                "changed": ("bool", None),
                "failed": ("bool", None),
            }
        )
        self.words = self._rows.words
        self.start_word = self._rows.first_word("starts")
        #: [words] int64: a block at position 0 of which nothing is known
        self.blank = self.encode(BlockState.unknown(0, [], size, mask_id), 0)

    def encode(self, state: BlockState, prompt_length: int) -> npt.NDArray[np.int64]:
        """The record, [words] int64, of a block whose positions before ``prompt_length`` are the prompt's."""
        record = np.zeros((1, self.words), np.int64)
        columns = self._rows.arrays(record)
        for name in ("ids", "known", "written_in", "logprobs", "rounds", "done", "changed", "failed"):
            columns[name][0] = getattr(state, name)
        columns["starts"][0] = state.start
        columns["counters"][0, : len(state.private)] = state.private
        columns["editable"][0, max(0, prompt_length - state.start) :] = True
        whole: npt.NDArray[np.int64] = record[0]
        return whole

    def block(self, records: torch.Tensor) -> tuple[Block, torch.Tensor]:
        """Block and counters, [R, num_counters], of records, [R, words]: the same memory."""
        columns = self._rows.views(records)
        counters = columns.pop("counters")
        return Block(**columns), counters

    def states(self, records: npt.NDArray[np.int64], num_counters: Sequence[int]) -> list[BlockState]:
        """What the host is told of R records, [R, words]; ``num_counters`` is each row's own."""
        columns = {name: column.tolist() for name, column in self._rows.arrays(records).items()}
        counters = zip(columns["counters"], num_counters, strict=True)
        columns["private"] = [tuple(values[:count]) for values, count in counters]
        return [BlockState(*row) for row in zip(*(columns[name] for name in _STATE), strict=True)]
