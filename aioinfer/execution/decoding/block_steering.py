"""BlockSteering: guides for rounds of requests whose parameters decide token after token.

What a request needs is kept by slot, on the host, and made anew from its output whenever it takes one: rows
of a slot that it has lost may go on for a while, and nobody reads what they write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from aioinfer.diffusion.block import Block
from aioinfer.diffusion.guide import steered
from aioinfer.diffusion.paths import Answer, BlockRow, Path, PathSearch, Question, Search, Walk
from aioinfer.diffusion.proposal import Asked, Proposal, propose
from aioinfer.execution.decoding.base import Guided
from aioinfer.execution.decoding.block_adjustments import Adjusting, Adjustments, filtered
from aioinfer.params import SamplingParams
from aioinfer.sampling.logits_processors import apply_masks_
from aioinfer.scheduling.step import NewRequestData
from aioinfer.text.grammar import GrammarBackend

__all__ = ["BlockSteering"]


class BlockSteering:
    """By slot, what guides the rows of its request. Launch thread only."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._rows: dict[int, _SteeredRow] = {}
        nobody = NewRequestData(SamplingParams(), 0, frozenset(), (), ())
        #: of a slot whose request has not come, because the step that brings it has failed
        self._vacant = _SteeredRow(Adjustments(nobody, block_size), None)

    def admit(self, slot: int, data: NewRequestData) -> None:
        """A request takes the slot."""
        self._rows.pop(slot, None)
        if not steered(data.params):
            return
        search: PathSearch | None = None
        if data.grammar is not None:
            search = Walk(data.grammar, data.output_ids, data.stop_ids)
            if (block := data.resume) is not None:
                search.take(block.start, block.ids, block.known)
        self._rows[slot] = _SteeredRow(Adjustments(data, self._size), search)

    def guide(self, slots: Sequence[int]) -> RowsGuide:
        """The guide of rows of these slots in one round."""
        return RowsGuide([self._rows.get(slot, self._vacant) for slot in slots])


@dataclass(slots=True)
class _SteeredRow:
    """What guides the rows of one request."""

    adjustments: Adjustments
    search: PathSearch | None


class RowsGuide:
    """See :class:`~aioinfer.diffusion.guide.Guide`."""

    def __init__(self, rows: Sequence[_SteeredRow]) -> None:
        self._searches = {at: row.search for at, row in enumerate(rows) if row.search is not None}
        self._rows = rows
        self._adjusting = Adjusting([row.adjustments for row in rows], list(self._searches))

    def adjust(self, logits: torch.Tensor, asked: Asked, block: Block) -> None:
        self._adjusting.adjust(logits, asked, block)

    def steer(self, logits: torch.Tensor, asked: Asked, proposal: Proposal, block: Block) -> torch.Tensor:
        self._adjusting.unfilter_(logits)
        writable = torch.ones_like(block.known)
        if self._searches:
            self._take_paths(logits, asked, proposal, block, writable)
        self._adjusting.judge(logits, asked, proposal)
        return writable

    def _take_paths(
        self,
        logits: torch.Tensor,
        asked: Asked,
        proposal: Proposal,
        block: Block,
        writable: torch.Tensor,
    ) -> None:
        paths = self._paths(logits, asked, _host_rows(self._searches, proposal, block))
        at = torch.tensor(list(paths), device=logits.device)
        found = list(paths.values())
        none = Path([-1] * block.ids.shape[1], [0.0] * block.ids.shape[1])
        tokens = torch.tensor([(path or none).tokens for path in found], device=logits.device)
        confidence = torch.tensor([(path or none).confidence for path in found], device=logits.device)
        there = tokens >= 0
        block.path.index_copy_(0, at, tokens)
        proposal.tokens.index_copy_(0, at, torch.where(there, tokens, asked.mask_id))
        proposal.confidence.index_copy_(0, at, confidence)
        dead = torch.tensor([path is None for path in found], device=logits.device).unsqueeze(1)
        proposal.valid.index_copy_(0, at, proposal.valid[at] & ~dead)
        # Under a grammar a token that was written stays.
        writable.index_copy_(0, at, (there | dead) & block.masked[at])

    def _paths(
        self, logits: torch.Tensor, asked: Asked, rows: Mapping[int, BlockRow]
    ) -> dict[int, Path | None]:
        """A path for each row, in turns: each turn answers one question of every row that has one."""
        found: dict[int, Path | None] = dict.fromkeys(rows)
        asking: list[tuple[int, Search, Question]] = []
        for at, row in rows.items():
            search = self._searches[at].search(row)
            try:
                asking.append((at, search, next(search)))
            except StopIteration as ended:
                found[at] = ended.value
        while asking:
            answers = self._answers(logits, asked, [(at, question) for at, _, question in asking])
            more: list[tuple[int, Search, Question]] = []
            for (at, search, _), answer in zip(asking, answers, strict=True):
                try:
                    more.append((at, search, search.send(answer)))
                except StopIteration as ended:
                    found[at] = ended.value
            asking = more
        return found

    def _answers(
        self, logits: torch.Tensor, asked: Asked, questions: Sequence[tuple[int, Question]]
    ) -> list[Answer]:
        rows = torch.tensor([at for at, _ in questions], device=logits.device)
        places = torch.tensor([question.at for _, question in questions], device=logits.device)
        lines = logits[rows, places]
        masks = np.zeros((len(questions), -(-logits.shape[2] // 32)), np.int32)
        groups: dict[int, tuple[GrammarBackend, list[int]]] = {}
        for line, (at, _) in enumerate(questions):
            backend = self._searches[at].state.backend
            groups.setdefault(id(backend), (backend, []))[1].append(line)
        for backend, mine in groups.values():
            backend.fill([questions[line][1].matcher for line in mine], [masks[line] for line in mine])
        apply_masks_(
            lines, torch.arange(len(lines), device=lines.device), torch.from_numpy(masks).to(lines.device)
        )
        lines = filtered(lines, [self._rows[at].adjustments.filters for at, _ in questions])
        lowered = asked.lowered
        one = replace(
            asked,
            positions=asked.positions[rows, places].unsqueeze(1),
            rounds=asked.rounds[rows],
            sampling={name: column[rows] for name, column in asked.sampling.items()},
            wanted=torch.ones_like(rows, dtype=torch.bool).unsqueeze(1),
            lowered=None if lowered is None else (lowered[0][rows, places].unsqueeze(1), lowered[1][rows]),
            entropy=False,
        )
        best = propose(lines.unsqueeze(1), one)
        tokens, valid = best.tokens[:, 0].tolist(), best.valid[:, 0].tolist()
        return [
            Answer(token if good else -1, sure)
            for token, good, sure in zip(tokens, valid, best.confidence[:, 0].tolist(), strict=True)
        ]

    def written(self, block: Block) -> None:
        self._adjusting.written(block)
        starts, ids, known = (column.tolist() for column in (block.starts, block.ids, block.known))
        for at, search in self._searches.items():
            search.take(starts[at], ids[at], known[at])

    def told(self) -> list[Guided]:
        """What the host is told of each row after the round."""
        found = [row.adjustments for row in self._rows]
        return [Guided([*each.tops], each.exhausted) for each in found]


def _host_rows(rows: Mapping[int, PathSearch], proposal: Proposal, block: Block) -> dict[int, BlockRow]:
    columns = (block.starts, block.ids, block.known, proposal.tokens, proposal.confidence, block.path)
    values = [column.tolist() for column in columns]
    return {at: BlockRow(*(column[at] for column in values)) for at in rows}
