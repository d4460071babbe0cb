"""DraftModel: a smaller model that draws the drafts which a step verifies, on the same device.

Its KV lies in a pool of its own under the same page tables. It computes only what it drafts for, so a
request's first drafts come with the prompt, and later ones with what was drafted wrongly or not at all
before::

    forward 0     known tokens that it lacks, and the row's own     draws d1
    forward 1     d1                                                draws d2
    ...
    target        the row's own, d1, d2 ...                         samples s1, s2 ...

It draws with the parameters and the noise of the target: the same seed, position and token
(:mod:`aioinfer.sampling.noise`). Where both models find the same tokens likely, both then draw the same one,
at any temperature (Daliri, Musco and Suresh, arXiv 2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from aioinfer.execution.packed import Layout
from aioinfer.execution.paging import Placement
from aioinfer.model.batch import Batch
from aioinfer.sampling.sampler import COLUMNS, Sampler
from aioinfer.sampling.verification import select
from aioinfer.scheduling.step import Step

if TYPE_CHECKING:
    import torch

    from aioinfer.execution.decoding.base import Transfer
    from aioinfer.model.attention.base import Attention
    from aioinfer.model.spec import CausalLM
    from aioinfer.sampling.batch import SamplingBatch

__all__ = ["DraftForward", "DraftModel", "draft_forwards"]

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DraftForward:
    """One forward of the draft model: V of its R rows draw a token. All arrays are int64."""

    #: [T]; in the first forward, 0 where the row's own token goes
    input_ids: _Ints
    placement: Placement
    q_lens: list[int]
    #: [V] indices of the tokens behind which is drawn, and the positions of what is drawn
    logits_rows: _Ints
    positions: _Ints
    #: [V] sampling row of the step whose parameters they are drawn with, and of which they are the expected
    #: token
    sampling_rows: _Ints
    #: [V] index in the step's input ids where the token goes; its own token is one place before the first
    into: _Ints


def draft_forwards(step: Step, layout: Layout, first: Sequence[int]) -> list[DraftForward]:
    """What a draft model computes before a step. ``first``: first sampling row of each row with drafts."""
    generating = step.generating
    before = generating.num_decodes
    drawing = sorted(
        (each for each in generating.draft_inputs if each.row >= 0),
        key=lambda each: -len(generating.drafts[each.row - before]),
    )
    inputs = [*drawing, *(each for each in generating.draft_inputs if each.row < 0)]
    if not inputs:
        return []
    rows = np.asarray([each.row for each in drawing], np.int64)
    counts = [len(generating.drafts[row - before]) for row in rows.tolist()]
    starts = generating.starts[rows]
    sampling = np.asarray([first[row - before] for row in rows.tolist()], np.int64)
    into = layout.placement.cu_q[rows] + 1
    slots = np.asarray([each.slot for each in inputs], np.int64)
    lengths = np.asarray([len(each.ids) + (each.row >= 0) for each in inputs], np.int64)
    placement = layout.tables.place(
        slots, np.asarray([each.start for each in inputs], np.int64), lengths, with_tables=True
    )
    ids = np.concatenate([np.asarray([*each.ids, *[0] * (each.row >= 0)], np.int64) for each in inputs])
    last = placement.cu_q[1 : 1 + len(rows)] - 1
    found = [DraftForward(ids, placement, lengths.tolist(), last, starts + 1, sampling, into)]
    for number in range(1, max(counts, default=0)):
        going = sum(count > number for count in counts)
        at = starts[:going] + number
        one = layout.tables.place(slots[:going], at, None, with_tables=True)
        found.append(
            DraftForward(
                np.zeros(going, np.int64),
                one,
                [1] * going,
                np.arange(going),
                at + 1,
                sampling[:going] + number,
                into[:going] + number,
            )
        )
    return found


class DraftModel:
    """Launch thread only."""

    __slots__ = ("_attention", "_model", "_sampler")

    def __init__(self, model: CausalLM, attention: Attention, sampler: Sampler) -> None:
        """``sampler``: that of the target."""
        self._model = model
        self._attention = attention
        self._sampler = sampler

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
        tokens = input_ids[:0]
        for number, forward in enumerate(forwards):
            ids, at = transfer.send(forward.input_ids), transfer.send(forward.logits_rows)
            into, sampling = transfer.send(forward.into), transfer.send(forward.sampling_rows)
            count = len(forward.logits_rows)
            ids[at] = tokens[:count] if number else input_ids[into - 1]
            logits = self._model.forward(_batch(forward, ids, at, transfer), self._attention)
            if not count:
                continue
            part = select(batch, sampling, COLUMNS)
            tokens = self._sampler.draw(
                logits.float(), replace(part, positions=transfer.send(forward.positions))
            )
            # What cannot be drawn is a draft that is wrong.
            tokens.clamp_(min=0)
            input_ids[into] = tokens
            rows.append(sampling)
            drafts.append(tokens)
        return (torch.cat(rows), torch.cat(drafts)) if rows else (tokens, tokens)


def _batch(forward: DraftForward, ids: torch.Tensor, at: torch.Tensor, transfer: Transfer) -> Batch:
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
