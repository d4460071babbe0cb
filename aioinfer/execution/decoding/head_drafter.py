"""HeadDrafter: draws the drafts which a step verifies with a draft head, over pages of the model's own pool.

What a head needs of a position are the model's hidden states there (:mod:`aioinfer.model.draft_heads.base`).
Those of chunks become entries at once, in the step that computes them. Those of generating rows wait in the
*stash* of their slot, a ring by position, until the head drafts for the request, or the ring is about to be
full::

    prompt   |---- chunk ----|-- last chunk --| decode  decode  decode + 3 drafts
    entries  ---------------- -------------->                   ▲ all up to the row's own token, and then
    stash                                    h   h       h  ────┘ its drafts, in turn or as a block

An entry is made of the model's own hidden states, but for those of drafts while they are drawn, which the
next drafts replace. It lies in a page that the prefix tree may share: the last entry of a page depends on the
first token behind it, too, and is that of the first request that came by.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from aioinfer.execution.decoding.draft_model import MASKED, DraftForward, draft_batch
from aioinfer.execution.packed import Layout
from aioinfer.model.batch import Batch
from aioinfer.sampling.sampler import COLUMNS, Sampler
from aioinfer.sampling.verification import select
from aioinfer.scheduling.speculation import STASHED
from aioinfer.scheduling.step import Step

if TYPE_CHECKING:
    import torch

    from aioinfer.execution.decoding.base import Transfer
    from aioinfer.model.attention.base import Attention
    from aioinfer.model.draft_heads.base import DraftHead
    from aioinfer.sampling.batch import SamplingBatch

__all__ = ["HeadDrafter", "HeadPacker", "HeadWork"]

_Ints = npt.NDArray[np.int64]
_NONE = np.empty(0, np.int64)


class Entries(NamedTuple):
    """Entries that are made of the stash; int64 [N] each."""

    positions: _Ints
    #: of the pool
    cells: _Ints
    #: of the stash
    stashed: _Ints
    #: the tokens behind the positions; -1: the one of the step's input ids that ``own`` says
    ids: _Ints
    own: _Ints


@dataclass(frozen=True, slots=True)
class HeadWork:
    """Work of a head in a step."""

    #: before the forward; None: none
    entries: Entries | None
    forwards: Sequence[DraftForward]
    #: [V] of the first forward: places in the stash of the hidden states that it reads
    stashed: _Ints
    #: after the forward: tokens of chunks, all but the last of each, of which entries are made
    chunks: _Ints
    #: tokens that are stashed, None: all, and where
    kept: _Ints | None
    places: _Ints


class HeadPacker:
    """The host's half. Loop thread only."""

    def __init__(self, num_slots: int, block: int | None, positions: int) -> None:
        """``block``, ``positions``: of the head."""
        self._block = block
        self._positions = positions
        #: by slot, the positions that its tenant has computed there, from the first on
        self._first = np.zeros(num_slots + 1, np.int64)
        self._stop = np.zeros(num_slots + 1, np.int64)

    def admit(self, slots: Iterable[int]) -> None:
        """These slots have new tenants."""
        for slot in slots:
            self._first[slot] = self._stop[slot] = 0

    def pack(self, step: Step, layout: Layout, first: Sequence[int]) -> HeadWork:
        """``first``: first sampling row of each row with drafts."""
        slots, positions = layout.slots, layout.placement.positions
        made = [*self._missing(step, layout)]
        chunks, kept, owners = _NONE, None, slots
        if layout.q_len is not None:
            owners = np.repeat(slots, layout.q_len)
        if step.prefilling:
            made += self._behind_chunks(step, layout)
            ends = layout.placement.cu_q[step.num_generating :]
            every = np.arange(len(positions))
            within = every >= ends[0]
            within[ends[1:] - 1] = False
            chunks, kept = every[within], every[~within]
            owners, positions = owners[kept], positions[kept]
            new = self._stop[slots] == 0
            self._first[slots[new]] = layout.starts[new]
        self._stop[slots] = layout.placement.kv_len
        entries = None
        if made:
            entries = Entries(*(np.concatenate(column) for column in zip(*made, strict=True)))
        forwards, stashed = self._forwards(step, layout, first)
        return HeadWork(entries, forwards, stashed, chunks, kept, _stashed(owners, positions))

    def _behind_chunks(self, step: Step, layout: Layout) -> Iterable[tuple[_Ints, ...]]:
        """The entry in front of each chunk, where the same tenant has computed the chunk before."""
        at = np.arange(step.num_generating, len(layout.slots))
        slots, starts = layout.slots[at], layout.starts[at]
        at = at[(self._first[slots] < starts) & (starts <= self._stop[slots])]
        if len(at):
            slots, own = layout.slots[at], layout.placement.cu_q[at]
            yield _entries(layout, slots, layout.starts[at] - 1, np.full(len(at), -1), own)

    def _missing(self, step: Step, layout: Layout) -> Iterable[tuple[_Ints, ...]]:
        """The entries that requests lack, but for those of the newest token where it is known on the device
        only."""
        for each in step.generating.draft_inputs:
            ids = np.asarray(each.ids, np.int64)
            own = np.zeros(len(ids), np.int64)
            if each.row >= 0 and self._block is not None:
                # What a block drafter reads of a position does not depend on tokens.
                ids, own = np.append(ids, 0), np.append(own, 0)
            if len(ids):
                positions = np.arange(each.start, each.start + len(ids))
                yield _entries(layout, np.full(len(ids), each.slot), positions, ids, own)

    def _forwards(self, step: Step, layout: Layout, first: Sequence[int]) -> tuple[list[DraftForward], _Ints]:
        generating = step.generating
        if not generating.draft_inputs:
            return [], _NONE
        before = generating.num_decodes
        drawing = [each for each in generating.draft_inputs if each.row >= 0]
        # Most drafts first.
        drawing.sort(key=lambda each: -len(generating.drafts[each.row - before]))
        if not drawing:
            return [], _NONE
        rows = np.asarray([each.row for each in drawing], np.int64)
        counts = np.asarray([len(generating.drafts[row - before]) for row in rows.tolist()], np.int64)
        slots, starts, own = layout.slots[rows], layout.starts[rows], layout.placement.cu_q[rows]
        sampling = np.asarray([first[row - before] for row in rows.tolist()], np.int64)
        if self._block is not None:
            return [self._block_forward(layout, slots, starts, own, counts, sampling)], _NONE
        forwards: list[DraftForward] = []
        for number in range(int(counts[0])):
            count = int((counts > number).sum())
            each, at = np.arange(count), own[:count] + number
            placement = layout.tables.place(slots[:count], starts[:count] + number - 1, None)
            forwards.append(
                DraftForward(
                    *(np.zeros(count, np.int64), placement, [1] * count, each, at, each),
                    *(starts[:count] + number + 1, sampling[:count] + number, at + 1, _NONE, _NONE),
                )
            )
        return forwards, _stashed(slots, starts - 1)

    def _block_forward(
        self, layout: Layout, slots: _Ints, starts: _Ints, own: _Ints, counts: _Ints, sampling: _Ints
    ) -> DraftForward:
        """The rows' own tokens and masks behind them, as many as the head drafts at once and the row's pages
        have room for."""
        assert self._block is not None
        size = layout.tables.page_size
        room = -(-(starts + 1 + counts) // size) * size - starts
        lengths = np.minimum(np.minimum(room, self._block), self._positions - starts)
        placement = layout.tables.place(slots, starts, lengths)
        begins = placement.cu_q[:-1]
        ids = np.full(int(lengths.sum()), MASKED, np.int64)
        numbers = np.concatenate([np.arange(count) for count in counts.tolist()])
        each = np.repeat(np.arange(len(slots)), counts)
        return DraftForward(
            *(ids, placement, lengths.tolist(), begins, own, begins[each] + 1 + numbers),
            *(starts[each] + 1 + numbers, sampling[each] + numbers, own[each] + 1 + numbers),
            *(_NONE, _NONE),
        )


def _entries(layout: Layout, slots: _Ints, positions: _Ints, ids: _Ints, own: _Ints) -> tuple[_Ints, ...]:
    cells = layout.tables.cells(slots, positions)
    return positions, cells, _stashed(slots, positions), ids, own


def _stashed(slots: _Ints, positions: _Ints) -> _Ints:
    return slots * STASHED + positions % STASHED


class HeadDrafter:
    """The device's half. Launch thread only."""

    def __init__(self, head: DraftHead, attention: Attention, sampler: Sampler, num_slots: int) -> None:
        """``attention``: over the pool of the model and its head; ``sampler``: that of the model."""
        import torch

        self._head = head
        self._attention = attention
        self._sampler = sampler
        #: of the hidden states that a step is to give
        self.places = head.places
        self._stash = torch.zeros((num_slots + 1) * STASHED, head.width, dtype=head.target.spec.dtype)

    def draw(
        self, work: HeadWork, input_ids: torch.Tensor, batch: SamplingBatch | None, transfer: Transfer
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Make the entries that a step needs, and fill the drafts into its ``input_ids``, [T] int64; results
        as of :meth:`~aioinfer.execution.decoding.draft_model.DraftModel.draw`. ``batch``: of the step's
        sampling rows, if anything is drafted."""
        import torch

        if work.entries is not None:
            self._make(work.entries, input_ids, transfer)
        head, rows, drafts = self._head, [], []
        features = self._features(work.stashed, transfer)
        for forward in work.forwards:
            assert batch is not None
            ids, at = transfer.send(forward.input_ids), transfer.send(forward.logits_rows)
            ids[transfer.send(forward.own)] = input_ids[transfer.send(forward.own_from)]
            made = draft_batch(forward, ids, at, transfer)
            normed, features = head.draft(ids, features[: len(ids)], made, self._attention)
            sampling = transfer.send(forward.sampling_rows)
            part = select(batch, sampling, COLUMNS)
            part.positions = transfer.send(forward.positions)
            # What cannot be drawn is a draft that is wrong.
            tokens = self._sampler.draw(head.logits(normed[at]).float(), part).clamp_(min=0)
            input_ids[transfer.send(forward.into)] = tokens
            rows.append(sampling)
            drafts.append(tokens)
        return (torch.cat(rows), torch.cat(drafts)) if rows else None

    def keep(self, work: HeadWork, batch: Batch, transfer: Transfer) -> None:
        """Take what the forward has left of its positions."""
        captured = batch.captured
        assert captured is not None, "the model gives hidden states"
        kept = captured if work.kept is None else captured[transfer.send(work.kept)]
        self._stash.index_copy_(0, transfer.send(work.places), kept)
        if not len(work.chunks):
            return
        at = transfer.send(work.chunks)
        features = self._head.features(captured[at])
        positions, cells = batch.positions[at], batch.slot_mapping[at]
        entries = _alone(batch.input_ids[at + 1], positions, cells)
        self._head.store(entries.input_ids, features, entries, self._attention)

    def _make(self, entries: Entries, input_ids: torch.Tensor, transfer: Transfer) -> None:
        ids = transfer.send(entries.ids)
        known = ids >= 0
        ids = ids.where(known, input_ids[transfer.send(entries.own)])
        batch = _alone(ids, transfer.send(entries.positions), transfer.send(entries.cells))
        self._head.store(ids, self._features(entries.stashed, transfer), batch, self._attention)

    def _features(self, stashed: _Ints, transfer: Transfer) -> torch.Tensor:
        found = self._stash[transfer.send(stashed)]
        return self._head.features(found) if len(found) else found


def _alone(ids: torch.Tensor, positions: torch.Tensor, cells: torch.Tensor) -> Batch:
    """Tokens whose keys and values are written, and that attend to nothing of use: each is a row of its own,
    over one cell of the null page."""
    import torch

    count = len(ids)
    ones = torch.ones(count, dtype=torch.int64)
    return Batch(
        input_ids=ids,
        positions=positions,
        slot_mapping=cells,
        cu_q=torch.arange(count + 1),
        kv_len=ones,
        block_table=ones.unsqueeze(1) * 0,
        logits_rows=ones[:0],
        q_lens=[1] * count,
        kv_lens=[1] * count,
        num_decodes=count,
    )
