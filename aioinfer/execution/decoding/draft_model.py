"""DraftModel: a smaller model that draws the drafts which a step verifies, on the same device.

Its KV lies in a pool of its own under the same page tables. It computes only what it drafts for, so a
request's first drafts come with the prompt, and later ones with what was drafted wrongly or not at all
before::

    forward 0     known tokens that it lacks, and the row's own     draws d1
    forward 1     d1                                                draws d2
    ...
    target        the row's own, d1, d2 ...                         samples s1, s2 ...

A diffusion model drafts the rest of a block in one forward, as if that were enough to denoise it::

    forward 0     blocks that it lacks, the row's own, masks        draws d1 up to the end of the block

A recurrent state takes in known tokens and the row's own, and is never that of a draft: each slot has a cell
for it, and one from which drafts go on.

It draws with the parameters and the noise of the target: the same seed, position and token
(:mod:`aioinfer.sampling.noise`). Where both models find the same tokens likely, both then draw the same one,
at any temperature (Daliri, Musco and Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aioinfer.execution.packed import Layout
from aioinfer.execution.paging import Placement
from aioinfer.model.batch import Batch
from aioinfer.model.state import RowStates, StatePool
from aioinfer.sampling.sampler import COLUMNS, Sampler
from aioinfer.sampling.verification import select
from aioinfer.scheduling.step import Step

if TYPE_CHECKING:
    import torch

    from aioinfer.execution.decoding.base import Transfer
    from aioinfer.model.attention.base import Attention
    from aioinfer.model.spec import CausalLM
    from aioinfer.sampling.batch import SamplingBatch

__all__ = ["MASKED", "DraftForward", "DraftModel", "draft_batch", "draft_forwards"]

_Ints = npt.NDArray[np.int64]
_NONE = np.empty(0, np.int64)
#: in the place of a mask token
MASKED = -1


@dataclass(frozen=True, slots=True)
class DraftForward:
    """One forward of the draft model, which draws V tokens. All arrays are int64."""

    #: [T]
    input_ids: _Ints
    placement: Placement
    q_lens: list[int]
    #: [O] indices here, and in the step's input ids, of tokens that the host does not know: those with which
    #: rows begin, or drafts of the forward before
    own: _Ints
    own_from: _Ints
    #: [V] indices of the tokens whose logits are drawn from, and the positions of what is drawn
    logits_rows: _Ints
    positions: _Ints
    #: [V] sampling rows of the step with whose parameters they are drawn, and of which they are the expected
    #: tokens
    sampling_rows: _Ints
    #: [V] indices in the step's input ids where they go
    into: _Ints
    #: [rows] cells of recurrent state: slot s has 2s - 1, and for what follows drafts 2s
    read: _Ints
    write: _Ints


def draft_forwards(step: Step, layout: Layout, first: Sequence[int]) -> list[DraftForward]:
    """Work of a draft model before a step. ``first``: first sampling row of each row with drafts."""
    rows, unit = _Rows(step, layout, first), step.generating.draft_unit
    if not rows.inputs:
        return []
    if unit > 1:
        return [_block_forward(rows, layout, unit)]
    further = range(1, max(rows.counts, default=0))
    return [_first_forward(rows, layout), *(_next_forward(rows, layout, number) for number in further)]


class _Rows:
    """The rows of a step that a draft model draws for, most drafts first, followed by those that it only
    catches up with."""

    def __init__(self, step: Step, layout: Layout, first: Sequence[int]) -> None:
        generating = step.generating
        before = generating.num_decodes
        drawing = sorted(
            (each for each in generating.draft_inputs if each.row >= 0),
            key=lambda each: -len(generating.drafts[each.row - before]),
        )
        self.inputs = [*drawing, *(each for each in generating.draft_inputs if each.row < 0)]
        rows = np.asarray([each.row for each in drawing], np.int64)
        self.counts = [len(generating.drafts[row - before]) for row in rows.tolist()]
        #: by drawing row: position of its own token, index of that in the step's input ids, first sampling
        #: row
        self.starts = generating.starts[rows]
        self.own = layout.placement.cu_q[rows]
        self.sampling = np.asarray([first[row - before] for row in rows.tolist()], np.int64)
        self.slots = np.asarray([each.slot for each in self.inputs], np.int64)

    def placed(self, layout: Layout, ids: Sequence[Sequence[int]]) -> tuple[_Ints, Placement, list[int]]:
        """The rows with these tokens, each from where it begins."""
        lengths = [len(each) for each in ids]
        starts = np.asarray([each.start for each in self.inputs], np.int64)
        placement = layout.tables.place(self.slots, starts, np.asarray(lengths, np.int64))
        return np.concatenate([np.asarray(each, np.int64) for each in ids]), placement, lengths


def _first_forward(rows: _Rows, layout: Layout) -> DraftForward:
    """The tokens that are missing, and the rows' own, after each of which the first draft is drawn."""
    placed = rows.placed(layout, [[*each.ids, *[0] * (each.row >= 0)] for each in rows.inputs])
    last = placed[1].cu_q[1 : 1 + len(rows.counts)] - 1
    cells = 2 * rows.slots - 1
    read = cells * [each.start > 0 for each in rows.inputs]
    into = rows.own + 1
    return DraftForward(
        *placed, last, rows.own, last, rows.starts + 1, rows.sampling, into, read=read, write=cells
    )


def _next_forward(rows: _Rows, layout: Layout, number: int) -> DraftForward:
    """Draft ``number``, after which the next is drawn."""
    count = sum(each > number for each in rows.counts)
    at, own, each = rows.starts[:count] + number, rows.own[:count] + number, np.arange(count)
    slots = rows.slots[:count]
    placement = layout.tables.place(slots, at, None)
    sampling = rows.sampling[:count] + number
    return DraftForward(
        *(np.zeros(count, np.int64), placement, [1] * count),
        *(each, own, each, at + 1, sampling, own + 1),
        read=2 * slots - (number == 1),
        write=2 * slots,
    )


def _block_forward(rows: _Rows, layout: Layout, unit: int) -> DraftForward:
    """Whole blocks from the first that is missing to that of the first draft, which is masked from there
    on."""
    ids: list[list[int]] = []
    own: list[int] = []
    columns: list[list[_Ints]] = [[], [], [], []]
    first = 0
    for at, each in enumerate(rows.inputs):
        known = list(each.ids)
        if each.row >= 0:
            start = int(rows.starts[at])
            stop = (start + 1) // unit * unit + unit
            own.append(first + len(known))
            drawn = np.arange(1, rows.counts[at] + 1)
            found = own[-1] + drawn, start + drawn, rows.sampling[at] + drawn - 1, rows.own[at] + drawn
            for column, values in zip(columns, found, strict=True):
                column.append(values)
            known += [0, *[MASKED] * (stop - start - 1)]
        ids.append(known)
        first += len(known)
    logits, positions, sampling, into = (np.concatenate(each) if each else _NONE for each in columns)
    placed, drawing = rows.placed(layout, ids), (logits, positions, sampling, into)
    return DraftForward(*placed, np.asarray(own, np.int64), rows.own, *drawing, _NONE, _NONE)


class DraftModel:
    """Launch thread only."""

    def __init__(
        self, model: CausalLM, attention: Attention, sampler: Sampler, states: StatePool | None = None
    ) -> None:
        """``sampler``: that of the target. ``states``: of a model with recurrent state, two cells a slot."""
        self._model = model
        self._mask_id = model.spec.mask_token_id
        self._attention = attention
        self._sampler = sampler
        self._states = states

    def draw(
        self,
        forwards: Sequence[DraftForward],
        input_ids: torch.Tensor,
        batch: SamplingBatch,
        transfer: Transfer,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Fill the drafts into the step's ``input_ids``, [T] int64.

        ``batch``: of the step's sampling rows. Returns the sampling rows of which the drafts are the expected
        tokens, and these, int64 [D] each.
        """
        import torch

        rows, drafts = [], []
        for forward in forwards:
            ids, at = transfer.send(forward.input_ids), transfer.send(forward.logits_rows)
            if self._mask_id is not None:
                ids = torch.where(ids == MASKED, self._mask_id, ids)
            ids[transfer.send(forward.own)] = input_ids[transfer.send(forward.own_from)]
            inputs = draft_batch(forward, ids, at, transfer)
            if self._states is not None:
                cells = transfer.send(forward.read), transfer.send(forward.write)
                inputs.states = RowStates(self._states, *cells)
            logits = self._model.forward(inputs, self._attention)
            if not len(forward.logits_rows):
                continue
            sampling = transfer.send(forward.sampling_rows)
            part = select(batch, sampling, COLUMNS)
            part.positions = transfer.send(forward.positions)
            # What cannot be drawn is a draft that is wrong.
            tokens = self._sampler.draw(logits.float(), part).clamp_(min=0)
            input_ids[transfer.send(forward.into)] = tokens
            rows.append(sampling)
            drafts.append(tokens)
        return (torch.cat(rows), torch.cat(drafts)) if rows else (input_ids[:0], input_ids[:0])


def draft_batch(forward: DraftForward, ids: torch.Tensor, at: torch.Tensor, transfer: Transfer) -> Batch:
    """The batch of a forward with these input ids; ``at``: its ``logits_rows``."""
    placement = forward.placement
    alone = all(length == 1 for length in forward.q_lens)
    return Batch(
        input_ids=ids,
        positions=transfer.send(placement.positions),
        slot_mapping=transfer.send(placement.slot_mapping),
        cu_q=transfer.send(placement.cu_q),
        kv_len=transfer.send(placement.kv_len),
        block_table=transfer.send(placement.block_table),
        logits_rows=at,
        q_lens=forward.q_lens,
        kv_lens=placement.kv_lens,
        num_decodes=len(forward.q_lens) if alone else 0,
    )
