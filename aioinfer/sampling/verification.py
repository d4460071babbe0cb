"""Verification: the sampling rows of a step some of whose rows verify drafts.

A row with k drafts has k + 1 sampling rows, one after the other. Each draws the token of its position as if
all drafts before it were right; those after the first wrong one are void::

    sampling row    first   first+1   first+2   first+3
    expected        d1      d2        d3        none        the token with which the next one counts
    sampled         d1      x         y         z
    counts          yes     yes       void      void
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    from aioinfer.sampling.batch import SamplingBatch

__all__ = ["DraftRows", "Drafts", "accepted", "select"]

#: no token has this id
_NONE = -1


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The S sampling rows of a step with drafts, on the host."""

    #: int64 [S]: which of the rows that sample each belongs to; how many of that row's positions follow
    rows: npt.NDArray[np.int64]
    behind: npt.NDArray[np.int64]
    #: int64 [S]: the first sampling row of each one's row, and the token that is expected of each; -1 for
    #: none
    start: npt.NDArray[np.int64]
    expected: npt.NDArray[np.int64]
    #: of each row with drafts, its first sampling row
    first: list[int]

    @classmethod
    def of(cls, num_before: int, drafts: Sequence[Sequence[int]], num_rows: int) -> DraftRows:
        """Make ``num_rows`` rows that sample; those after the first ``num_before`` have ``drafts``."""
        counts = np.ones(num_rows, np.int64)
        counts[num_before : num_before + len(drafts)] += np.asarray([len(ids) for ids in drafts], np.int64)
        first = np.cumsum(counts) - counts
        rows = np.repeat(np.arange(num_rows), counts)
        start = first[rows]
        expected = np.full(len(rows), _NONE, np.int64)
        for at, ids in enumerate(drafts, num_before):
            expected[first[at] : first[at] + len(ids)] = ids  # those that are not drawn yet are -1, too
        behind = counts[rows] - 1 - (np.arange(len(rows)) - start)
        return cls(rows, behind, start, expected, first[num_before : num_before + len(drafts)].tolist())

    def cut(self, usable: Mapping[int, int]) -> npt.NDArray[np.int64]:
        """``expected``, where the rows that begin at these sampling rows may use only that many of them."""
        expected = self.expected.copy()
        for at, count in usable.items():
            expected[at + count - 1] = _NONE
        return expected

    def levels(self) -> list[npt.NDArray[np.int64]]:
        """The sampling rows by how many of their row are before them."""
        offsets = np.arange(len(self.rows)) - self.start
        return [np.flatnonzero(offsets == offset) for offset in range(int(offsets.max()) + 1)]


@dataclass(frozen=True, slots=True)
class Drafts:
    """The same on the logits' device."""

    #: int64 [S] each, as in :class:`DraftRows`
    start: torch.Tensor
    expected: torch.Tensor
    #: as of :meth:`DraftRows.levels`, if a row with drafts has penalties, which depend on the tokens before
    #: each position; else empty
    levels: Sequence[torch.Tensor] = ()


def accepted(tokens: torch.Tensor, drafts: Drafts) -> tuple[torch.Tensor, torch.Tensor]:
    """Which sampling rows count, and which are the last of their row that do; bool [S] each.

    Args:
        tokens: int64 [S], as sampled.
    """
    wrong = (tokens != drafts.expected).long()
    before = wrong.cumsum(0) - wrong
    counts = before == before[drafts.start]
    return counts, counts & wrong.bool()


def select(batch: SamplingBatch, at: torch.Tensor, columns: Sequence[str]) -> SamplingBatch:
    """The rows ``at``, int64, of a batch, without resets. On CUDA, waits for the device if any row has banned
    ids or further filters."""
    place = batch.slots.new_full((len(batch.slots),), -1)
    place[at] = place.new_tensor(range(len(at)))
    banned_rows, banned_ids = batch.banned_rows, batch.banned_ids
    if banned_rows is not None and banned_ids is not None:
        kept = place[banned_rows] >= 0
        banned_rows, banned_ids = place[banned_rows[kept]], banned_ids[kept]
    filters = []
    for each in batch.filters:
        kept = place[each.rows] >= 0
        filters.append(replace(each, rows=place[each.rows[kept]], values=each.values[kept]))
    return replace(
        batch,
        **{name: getattr(batch, name)[at] for name in columns},
        banned_rows=banned_rows,
        banned_ids=banned_ids,
        filters=filters,
        penalty_resets=[],
    )
