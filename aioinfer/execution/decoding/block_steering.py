"""BlockSteering: guides for rounds of requests whose parameters decide token after token.

What a request needs is kept by slot, on the host, and made anew from its output whenever it takes one: rows
of a slot that it has lost may go on for a while, and nobody reads what they write.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from aioinfer.diffusion.block import Block
from aioinfer.diffusion.closed_search import ClosedSearch
from aioinfer.diffusion.guide import steered
from aioinfer.diffusion.paths import BlockRow, Path, PathSearch, Walk
from aioinfer.diffusion.proposal import Asked, Proposal
from aioinfer.execution.decoding.base import Guided
from aioinfer.execution.decoding.block_adjustments import Adjusting, Adjustments
from aioinfer.execution.decoding.path_turns import Found, PathTurns, Seeker
from aioinfer.execution.grammar_worker import GrammarWorker
from aioinfer.params import SamplingParams
from aioinfer.scheduling.step import NewRequestData

__all__ = ["BlockSteering", "RowsGuide"]


class BlockSteering:
    """By slot, what guides the rows of its request. Launch thread only."""

    def __init__(self, block_size: int, worker: GrammarWorker) -> None:
        self._size = block_size
        self._rows: dict[int, _SteeredRow] = {}
        self._turns = PathTurns(worker)
        nobody = NewRequestData(SamplingParams(), 0, frozenset(), (), ())
        #: of a slot whose request has not come, because the step that brings it has failed
        self._vacant = _SteeredRow(Adjustments(nobody, block_size), None)

    def admit(self, slot: int, data: NewRequestData) -> None:
        """A request takes the slot."""
        self._rows.pop(slot, None)
        if steered(data.params):
            adjustments = Adjustments(data, self._size)
            self._rows[slot] = _SteeredRow(adjustments, _seeker(data, adjustments))

    def guide(self, slots: Sequence[int], *, alone: bool) -> RowsGuide:
        """The guide of rows of these slots in one round; ``alone``: these are all rows of the step."""
        return RowsGuide([self._rows.get(slot, self._vacant) for slot in slots], self._turns, alone=alone)


@dataclass(slots=True)
class _SteeredRow:
    """What guides the rows of one request."""

    adjustments: Adjustments
    seeker: Seeker | None


def _seeker(data: NewRequestData, adjustments: Adjustments) -> Seeker | None:
    state = data.grammar
    if state is None:
        return None
    search: PathSearch
    if state.closed is not None:
        search = ClosedSearch(state, state.closed, data.output_ids, data.max_length)
    else:
        search = Walk(state, data.output_ids, data.stop_ids)
    if (block := data.resume) is not None:
        search.take(block.start, block.ids, block.known)
    return Seeker(search, adjustments.filters)


class RowsGuide:
    """See :class:`~aioinfer.diffusion.guide.Guide`."""

    def __init__(self, rows: Sequence[_SteeredRow], turns: PathTurns, *, alone: bool = False) -> None:
        self._rows = rows
        self._seekers = {at: row.seeker for at, row in enumerate(rows) if row.seeker is not None}
        self._adjusting = Adjusting([row.adjustments for row in rows], list(self._seekers))
        self._turns = turns
        self._alone = alone and len(self._seekers) == len(rows)
        self.waits: torch.Tensor | None = None
        #: where this round may write; None: anywhere
        self._writable: torch.Tensor | None = None

    def adjust(self, logits: torch.Tensor, asked: Asked, block: Block) -> None:
        self._adjusting.adjust(logits, asked, block)

    def steer(self, logits: torch.Tensor, asked: Asked, proposal: Proposal, block: Block) -> torch.Tensor:
        self._adjusting.unfilter_(logits)
        writable = torch.ones_like(block.known)
        if self._seekers:
            # Logits that are broken are not the grammar's fault.
            sound = ((proposal.valid | ~block.masked).all(1) & ~block.done).tolist()
            seekers = {at: seeker for at, seeker in self._seekers.items() if sound[at]}
            if seekers:
                rows = _host_rows(seekers, logits, proposal, block)
                alone = self._alone and len(rows) == len(sound)
                found = self._turns.find(rows, logits, asked, alone=alone)
                writable, self.waits = _propose_paths(found, logits.shape[2], proposal, block)
                self._writable = writable
        self._adjusting.judge(logits, asked, proposal)
        return writable

    def written(self, block: Block) -> None:
        self._adjusting.written(block)
        starts, ids, known = (column.tolist() for column in (block.starts, block.ids, block.known))
        for at, seeker in self._seekers.items():
            seeker.search.take(starts[at], ids[at], known[at])
        if self._writable is not None and self.waits is not None:
            # All of its path is written: behind that, rounds would go on in vain.
            left = block.masked
            block.done |= left.any(1) & ~(left & self._writable).any(1) & ~self.waits

    def told(self) -> list[Guided]:
        """What the host is told of each row after the round."""
        found = [row.adjustments for row in self._rows]
        return [Guided([*each.tops], each.exhausted) for each in found]


def _propose_paths(
    found: Mapping[int, Found], vocab_size: int, proposal: Proposal, block: Block
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the tokens of the paths those that are proposed, -1 where they have none. Returns where they may
    be written, [R, B], and the rows that have no path yet, [R]."""
    device, size = block.ids.device, block.ids.shape[1]
    at = torch.tensor(list(found), device=device)
    paths = [each.path or Path([-1] * size, [0.0] * size) for each in found.values()]
    # torch takes five times as long to read lists.
    tokens = torch.from_numpy(np.array([path.tokens for path in paths], np.int64)).to(device)
    confidence = torch.from_numpy(np.array([path.confidence for path in paths], np.float32)).to(device)
    late = torch.tensor([each.late for each in found.values()], device=device).unsqueeze(1)
    dead = torch.tensor([each.path is None for each in found.values()], device=device).unsqueeze(1) & ~late
    there = tokens >= 0
    block.path.index_copy_(0, at, torch.where(late, block.path[at], tokens))
    if proposal.entropy is not None:
        entropy, most = proposal.entropy[at], _most_entropy(confidence, vocab_size)
        surer = confidence > proposal.confidence[at]
        proposal.entropy.index_copy_(0, at, torch.where(surer, entropy.minimum(most), entropy))
    proposal.tokens.index_copy_(0, at, tokens)
    proposal.confidence.index_copy_(0, at, confidence)
    proposal.valid.index_copy_(0, at, proposal.valid[at] & ~dead)
    writable = torch.ones_like(block.known)
    # Under a grammar a token that was written stays.
    writable.index_copy_(0, at, (there | dead) & block.masked[at])
    waits = torch.zeros_like(block.done)
    waits.index_copy_(0, at, late.squeeze(1))
    return writable, waits


def _most_entropy(confidence: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The greatest entropy of a distribution in which one token has this probability, in nats."""
    others = (1 - confidence).clamp(min=0)
    return others * math.log(vocab_size) - torch.xlogy(confidence, confidence) - torch.xlogy(others, others)


def _host_rows(
    seekers: Mapping[int, Seeker], logits: torch.Tensor, proposal: Proposal, block: Block
) -> dict[int, tuple[Seeker, BlockRow]]:
    # A path may come from anywhere, if its request does.
    path = torch.where((block.path >= 0) & (block.path < logits.shape[2]), block.path, -1)
    own = logits.gather(2, path.clamp(min=0).unsqueeze(2)).squeeze(2) - logits.amax(2)
    likely = own.exp() / proposal.mass
    columns = (block.starts, block.ids, block.known, proposal.tokens, proposal.confidence, path, likely)
    values = [column.tolist() for column in columns]
    return {at: (seeker, BlockRow(*(column[at] for column in values))) for at, seeker in seekers.items()}
