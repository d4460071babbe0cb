"""Records: the whole state of a block in one row of 64-bit words.

A round gathers the records of its rows with one operation, works on views of them, scatters them back with
another and copies them to the host with a third, for any number of columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.pins import Pins
from aioinfer.diffusion.state import BlockState

__all__ = ["BlockRecords", "WordRows"]

_WORD = 8
_TORCH = {"int64": torch.int64, "float32": torch.float32, "bool": torch.bool}
#: columns in the order of BlockState's fields
_STATE = (
    *("starts", "ids", "known", "written_in", "logprobs", "rounds", "done", "changed", "failed"),
    "private",
    "path",
)
_Array = TypeVar("_Array", torch.Tensor, npt.NDArray[Any])


@dataclass(frozen=True, slots=True)
class _Section:
    """Adjacent columns of one dtype."""

    dtype: str
    first_word: int
    words: int
    names: list[str]
    #: values per row of each column, and last the padding of the last word
    counts: list[int]
    #: columns of one value per row, without a dimension of their own
    single: set[str]

    def named(self, columns: Sequence[_Array]) -> dict[str, _Array]:
        """The columns by name, from the parts into which the section was split."""
        return {
            name: column[:, 0] if name in self.single else column
            for name, column in zip(self.names, columns, strict=False)
        }


class WordRows:
    """Columns of several dtypes, laid out in rows of int64 words."""

    def __init__(self, columns: Mapping[str, tuple[str, int | None]]) -> None:
        """``columns``: by name, the dtype (int64, float32 or bool) and the number of values per row; None is
        one value without a dimension of its own."""
        self._sections: list[_Section] = []
        self.words = 0
        for dtype in _TORCH:
            mine = {name: count for name, (kind, count) in columns.items() if kind == dtype}
            counts = [1 if count is None else count for count in mine.values()]
            per_word = _WORD // np.dtype(dtype).itemsize
            words = -(-sum(counts) // per_word)
            if not words:
                continue
            counts.append(words * per_word - sum(counts))
            single = {name for name, count in mine.items() if count is None}
            self._sections.append(_Section(dtype, self.words, words, list(mine), counts, single))
            self.words += words

    def first_word(self, name: str) -> int:
        """Index of the first word of a column of int64."""
        section = self._sections[0]
        return sum(section.counts[: section.names.index(name)])

    def views(self, table: torch.Tensor) -> Rows:
        """The columns of a table [R, words] int64 as views of its memory, [R] or [R, count] each."""
        found: Rows = {}
        parts = torch.split(table, [section.words for section in self._sections], 1)
        for section, part in zip(self._sections, parts, strict=True):
            values = part if section.dtype == "int64" else part.view(_TORCH[section.dtype])
            found |= section.named(torch.split(values, section.counts, 1))
        return found

    def arrays(self, table: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[Any]]:
        """:meth:`views` for an array on the host."""
        found: dict[str, npt.NDArray[Any]] = {}
        for section in self._sections:
            part = table[:, section.first_word : section.first_word + section.words].view(section.dtype)
            found |= section.named(np.split(part, list(accumulate(section.counts))[:-1], axis=1))
        return found


class BlockRecords:
    """The record of a :class:`~aioinfer.diffusion.block.Block` and of its algorithm's counters."""

    def __init__(self, size: int, mask_id: int, num_counters: int) -> None:
        """``num_counters`` is the largest number of counters of any algorithm."""
        self.size = size
        self.num_counters = num_counters
        self._rows = WordRows(
            {
                "ids": ("int64", size),
                "written_in": ("int64", size),
                "path": ("int64", size),
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
        #: [words] int64: a block at position 0 without any known token
        self.blank = self.encode(BlockState.unknown(0, [], size, mask_id), 0)

    def encode(
        self, state: BlockState, prompt_length: int, pins: Pins | None = None
    ) -> npt.NDArray[np.int64]:
        """The record, [words] int64, of a block whose positions before ``prompt_length`` are of the
        prompt."""
        record = np.zeros((1, self.words), np.int64)
        columns = self._rows.arrays(record)
        for name in ("ids", "known", "written_in", "logprobs", "rounds", "done", "changed", "failed"):
            columns[name][0] = getattr(state, name)
        columns["starts"][0] = state.start
        columns["counters"][0, : len(state.private)] = state.private
        columns["path"][0] = state.path or -1
        columns["editable"][0, max(0, prompt_length - state.start) :] = True
        if pins is not None:
            columns["editable"][0] &= pins.writable(state.start, self.size)
        whole: npt.NDArray[np.int64] = record[0]
        return whole

    def block(self, records: torch.Tensor) -> tuple[Block, torch.Tensor]:
        """Blocks and counters [R, num_counters], as views of records [R, words]."""
        columns = self._rows.views(records)
        counters = columns.pop("counters")
        return Block(**columns), counters

    def states(self, records: npt.NDArray[np.int64], num_counters: Sequence[int]) -> list[BlockState]:
        """The states in R records [R, words]; ``num_counters`` is the number of counters of each row."""
        columns = {name: column.tolist() for name, column in self._rows.arrays(records).items()}
        counters = zip(columns["counters"], num_counters, strict=True)
        columns["private"] = [tuple(values[:count]) for values, count in counters]
        return [BlockState(*row) for row in zip(*(columns[name] for name in _STATE), strict=True)]
