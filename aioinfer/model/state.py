"""StatePool: the recurrent state of layers that keep a state of fixed size instead of keys and values.

Such a layer (a short convolution, a gated delta rule) reads the state of a row's sequence as it was before
the row's first token, and leaves it as it is after the last one. A *cell* holds one such state of all
layers::

    cell 0                     null: reads as zeros, the state of an empty sequence; what padding writes there
                               is never read
    cells 1 .. num_slots       of the slot of the same number
    further cells              snapshots: states at the end of cached prefixes

A row may read one cell and write another, so a snapshot is taken and used without a copy. No cell is written
by one row of a step and accessed by another one.

A draft may be wrong, and a state cannot be taken back. So a row that verifies drafts leaves the state in
front of them, and in the *stash* of its slot what the drafts brought to each such layer. The next row of the
sequence replays what was right of that before its own tokens. Nothing else is computed again: projections,
attention and feed-forward parts are of the row's own tokens alone::

    row        a d1 d2 d3                b d4 d5           b was sampled behind d2
    replays    -                         d1 d2
    state      ... a                     ... a d1 d2 b
    stash      d1 d2 d3                  d4 d5
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from aioinfer.model.attention.pool import pool_zeros

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["RowStates", "StatePool", "StateShape"]


class StateShape(NamedTuple):
    """One tensor of a cell."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    #: elements, of the model's dtype, that a token brings to the layer and that change the tensor; 0: they
    #: are not stashed, and no drafts can be verified
    inputs: int = 0

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class StatePool:
    """The cells of all layers. ``tensors[i]``: of ``shapes[i]``, ``[num_cells + 1, *shape]``, zeros at
    first. ``stashes[i]``: ``[num_slots + 1, drafts, inputs]``."""

    __slots__ = ("drafts", "num_cells", "stashes", "tensors")

    def __init__(
        self,
        shapes: Sequence[StateShape],
        num_cells: int,
        device: torch.device,
        *,
        num_slots: int = 0,
        drafts: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        """``drafts``: that a row may verify, of ``num_slots`` slots; ``dtype``: the model's."""
        self.num_cells = num_cells
        self.drafts = drafts
        self.tensors = [
            pool_zeros((num_cells + 1, *shape), dtype, device, "recurrent states")
            for shape, dtype, _ in shapes
        ]
        self.stashes = [
            pool_zeros((num_slots + 1, drafts, each.inputs), dtype, device, "inputs of drafts")
            for each in shapes
            if drafts
        ]


class _Batch(Protocol):
    """Of a :class:`~aioinfer.model.batch.Batch`, which has these states."""

    input_ids: torch.Tensor
    q_lens: list[int]
    num_decodes: int


@dataclass(slots=True)
class RowStates:
    """The cells of the rows of a step."""

    pool: StatePool
    #: [R] int64, the cell that row r starts from; 0: it starts from zeros
    read: torch.Tensor
    #: [R] int64, the cell that holds the state after row r
    write: torch.Tensor
    #: [R] int64 on the host: slots, whose stashes the rows have
    slots: npt.NDArray[np.int64] | None = None
    #: of a step in which rows verify drafts or come next, on the host, else None: [R + 1] int64, row r
    #: replays ``replays[r + 1] - replays[r]`` positions
    replays: npt.NDArray[np.int64] | None = None
    #: and [R] int64, positions of row r that its state includes; the others are drafts
    kept: npt.NDArray[np.int64] | None = None
    _places: _Places | None = field(default=None, init=False)

    def lengths(self, batch: _Batch) -> tuple[int, list[tuple[int, int]]]:
        """The number of rows at the beginning that go through one token, and of each other row the number of
        positions that it goes through and of those that its state includes."""
        q_lens, decodes = batch.q_lens, batch.num_decodes
        if self.replays is None or self.kept is None:
            return decodes, [(count, count) for count in q_lens[decodes:]]
        counts = np.diff(self.replays)
        decodes -= int(np.count_nonzero(counts[:decodes]))
        again = counts[decodes:]
        return decodes, list(
            zip((again + q_lens[decodes:]).tolist(), (again + self.kept[decodes:]).tolist(), strict=True)
        )

    def extend(self, index: int, inputs: torch.Tensor, batch: _Batch) -> torch.Tensor:
        """What the tokens of the step bring to a layer, [T, n] for the tensor ``index`` of its state, to the
        same of all positions that the rows go through, [T + replays, n]. Stashes that of drafts."""
        if self.replays is None:
            return inputs
        places, stash = self._places_of(batch), self.pool.stashes[index].flatten(0, 1)
        extended = inputs.new_empty(len(inputs) + len(places.again), inputs.shape[1])
        extended[places.own] = inputs
        extended[places.again] = stash[places.stashed]
        stash[places.into] = inputs[places.drafts]
        return extended

    def own(self, results: torch.Tensor, batch: _Batch) -> torch.Tensor:
        """Of results of all positions that the rows go through, those of the step's tokens."""
        return results if self.replays is None else results[self._places_of(batch).own]

    def _places_of(self, batch: _Batch) -> _Places:
        if self._places is None:
            assert self.slots is not None
            assert self.replays is not None
            assert self.kept is not None
            counts, lengths = np.diff(self.replays), np.asarray(batch.q_lens)
            totals, drafts = counts + lengths, lengths - self.kept
            ends, stashes = totals.cumsum(), self.slots * self.pool.drafts
            found = (
                *(_runs(ends - lengths, lengths), _runs(ends - totals, counts), _runs(stashes, counts)),
                *(_runs(lengths.cumsum() - drafts, drafts), _runs(stashes, drafts)),
            )
            device = batch.input_ids.device
            self._places = _Places(*(torch.from_numpy(each).to(device) for each in found))
        return self._places


class _Places(NamedTuple):
    """Indices, int64."""

    #: of the step's tokens, and of those that are replayed, among all positions that the rows go through
    own: torch.Tensor
    again: torch.Tensor
    #: in the stashes, those that are replayed
    stashed: torch.Tensor
    #: among the step's tokens, drafts; and in the stashes, where they go
    drafts: torch.Tensor
    into: torch.Tensor


def _runs(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """``counts[r]`` numbers from ``starts[r]`` on, one run after the other."""
    ends = counts.cumsum()
    return np.repeat(starts - ends + counts, counts) + np.arange(int(counts.sum()))
