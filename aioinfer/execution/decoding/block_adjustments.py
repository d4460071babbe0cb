"""Adjustments: what parameters of requests do to the logits of single positions of their blocks.

::

    logits ─► logit_bias ─► allowed_token_ids ─► penalties ─► min_tokens ─► further filters ─► propose
       └─► logprobs, of the tokens that the round writes

The operations are those of the sampler. What a penalty counts is the output before the block and the block's
tokens at the start of the round, but not the position's own: tokens of one round do not see each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from aioinfer.diffusion.block import Block
from aioinfer.diffusion.proposal import Asked, Proposal, lower_, propose
from aioinfer.diffusion.state import Tops
from aioinfer.execution.decoding.sampling_metadata import token_mask
from aioinfer.sampling.batch import FilterRows
from aioinfer.sampling.filters import apply_further
from aioinfer.sampling.logits_processors import add_biases_, apply_masks_, ban_
from aioinfer.sampling.penalties import IN_PROMPT, penalise_counted
from aioinfer.scheduling.step import NewRequestData

__all__ = ["Adjusting", "Adjustments", "filtered"]

_NEVER = float("-inf")


class Adjustments:
    """Those of one request, and what they depend on: its output before a block, and the block."""

    __slots__ = (
        *("_counted", "_known", "_newest", "_start"),
        "exhausted",
        "params",
        "prompt_length",
        "stop_ids",
        "tops",
    )

    def __init__(self, data: NewRequestData, size: int) -> None:
        """``size``: positions of a block."""
        self.params = data.params
        self.stop_ids = sorted(data.stop_ids)
        self.prompt_length = begun = len(data.prompt_ids)
        resume = data.resume
        self._start = (begun + len(data.output_ids)) // size * size if resume is None else resume.start
        before = max(0, self._start - begun)
        #: tokens of prompt and output before the block, counted as by Penalties
        self._counted: Counter[int] = Counter()
        if self.params.penalised:
            self._counted.update(data.output_ids[:before])
        if self.params.repetition_penalty != 1:
            self._counted.update(dict.fromkeys(data.prompt_ids, IN_PROMPT))
        self._known = _arrays(self._counted)
        #: own tokens of the block, as the newest round left them
        self._newest: Sequence[int] = data.output_ids[before:]
        #: by position of the block, the likeliest tokens and their logprobs; () where nothing was written
        self.tops: Tops = [()] * size if resume is None or not resume.tops else [*resume.tops]
        #: a position had no token that is allowed
        self.exhausted = False

    def turn(self, start: int) -> None:
        """The round is for the block that begins there."""
        if start > self._start:
            if self.params.penalised:
                self._counted.update(self._newest)
                self._known = _arrays(self._counted)
            self._start, self._newest, self.tops = start, (), [()] * len(self.tops)

    def own(self, block: Block, row: int) -> torch.Tensor:
        """The positions of a row that hold tokens of the output, pinned ones included, bool [B]."""
        return block.known[row] & (block.positions[row] >= self.prompt_length)

    def leave(self, tokens: Sequence[int]) -> None:
        """A round is over; ``tokens``: own tokens of the block."""
        self._newest = tokens

    def adjust(self, lines: torch.Tensor, ids: torch.Tensor, own: torch.Tensor) -> None:
        """Change the logits of the block, [B, V], in place. ``ids``: of its positions, [B]; ``own``: which of
        them are tokens of the output, bool [B]."""
        params, size, device = self.params, len(lines), lines.device
        if params.logit_bias:
            biased = torch.tensor(list(params.logit_bias), device=device)
            values = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32, device=device)
            rows = torch.arange(size, device=device).repeat_interleave(len(biased))
            bits = values.view(torch.int32).to(torch.int64)
            add_biases_(lines, rows, biased.repeat(size), bits.repeat(size))
        if params.allowed_token_ids is not None:
            mask = torch.from_numpy(token_mask(params.allowed_token_ids)).to(device)
            apply_masks_(lines, torch.arange(size, device=device), mask.expand(size, -1))
        if params.penalised:
            self._penalise(lines, ids, own)
        early = min(size, self.prompt_length + params.min_tokens - self._start)
        if params.min_tokens and early > 0 and self.stop_ids:
            ends = torch.tensor(self.stop_ids, device=device)
            ban_(lines, torch.arange(early, device=device).repeat_interleave(len(ends)), ends.repeat(early))

    def _penalise(self, lines: torch.Tensor, ids: torch.Tensor, own: torch.Tensor) -> None:
        before, numbers = self._known
        mine = ids[own].cpu().numpy()
        tokens, places = np.unique(np.concatenate((before, mine)), return_inverse=True)
        if not len(tokens):
            return
        counts = np.zeros(len(tokens), np.int32)
        counts[places[: len(before)]] = numbers
        np.add.at(counts, places[len(before) :], 1)
        columns = torch.from_numpy(tokens).to(lines.device)
        each = torch.from_numpy(counts).to(lines.device).repeat(len(lines), 1)
        each[own, torch.from_numpy(places[len(before) :]).to(lines.device)] -= 1
        params = self.params
        repetition, presence, frequency = (
            torch.tensor(value, dtype=torch.float32, device=lines.device)
            for value in (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
        )
        lines[:, columns] = penalise_counted(lines[:, columns], each, repetition, presence, frequency)

    @property
    def filters(self) -> dict[str, float]:
        """Further filters, of tokens that are drawn."""
        return {} if self.params.greedy else self.params.further_filters

    @property
    def changes(self) -> bool:
        """:meth:`adjust` does something."""
        params = self.params
        one_by_one = params.logit_bias is not None or params.allowed_token_ids is not None
        return one_by_one or params.penalised or params.min_tokens > 0


def _arrays(counted: Counter[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Tokens and how often they were counted."""
    return np.fromiter(counted, np.int64), np.fromiter(counted.values(), np.int32)


class _Scored(NamedTuple):
    """The distributions of the model at temperature 1, for logprobs of N positions."""

    #: [R, B] bool
    where: torch.Tensor
    #: [N, V] logits; [N] the largest of them, and the logarithm of the mass relative to that
    logits: torch.Tensor
    best: torch.Tensor
    log_mass: torch.Tensor


class Adjusting:
    """The adjustments of R rows in one round."""

    def __init__(self, rows: Sequence[Adjustments], searching: Sequence[int]) -> None:
        """``searching``: rows whose tokens are searched among the logits before further filters."""
        self._rows = rows
        self._searching = frozenset(searching)
        self._scored: _Scored | None = None
        #: by row, its logits before further filters
        self._unfiltered: dict[int, torch.Tensor] = {}

    def adjust(self, logits: torch.Tensor, asked: Asked, block: Block) -> None:
        """Change the logits, [R, B, V] float32, in place."""
        for row, start in zip(self._rows, block.starts.tolist(), strict=True):
            row.turn(start)
        self._score(logits, asked)
        live = asked.wanted.any(1).tolist()
        for at, row in enumerate(self._rows):
            if row.changes and live[at]:
                row.adjust(logits[at], block.ids[at], row.own(block, at))
        logits[..., asked.mask_id] = _NEVER
        for at, row in enumerate(self._rows):
            if row.filters and live[at]:
                if at in self._searching:
                    self._unfiltered[at] = logits[at].clone()
                logits[at] = filtered(logits[at], [row.filters] * len(logits[at]))

    def unfilter_(self, logits: torch.Tensor) -> None:
        """Restore what further filters removed in rows that search."""
        for at, lines in self._unfiltered.items():
            logits[at] = lines

    def _score(self, logits: torch.Tensor, asked: Asked) -> None:
        rows = [row.params.logprobs is not None for row in self._rows]
        if not any(rows):
            return
        where = asked.wanted & torch.tensor(rows, device=logits.device).unsqueeze(1)
        lines = logits[where].unsqueeze(1)
        if asked.lowered is not None:
            ids, by = asked.lowered
            lower_(lines, ids[where].unsqueeze(1), by.unsqueeze(1).expand_as(ids)[where])
        lines[..., asked.mask_id] = _NEVER
        plain = replace(asked, drawn=False, filtered=False, lowered=None, entropy=False)
        found = propose(lines, plain)
        best = lines.gather(2, found.tokens.unsqueeze(2)).view(-1)
        self._scored = _Scored(where, lines.squeeze(1), best, found.mass.view(-1).log())

    def judge(self, logits: torch.Tensor, asked: Asked, proposal: Proposal) -> None:
        """The tokens are proposed: their logprobs become those of the model. Rows in which some position
        has no token that is allowed are noted."""
        if (scored := self._scored) is not None:
            tokens = proposal.tokens[scored.where].clamp(min=0).unsqueeze(1)
            relative = scored.logits.gather(1, tokens).squeeze(1) - scored.best
            proposal.logprobs[scored.where] = relative - scored.log_mass
        broken = (asked.wanted & ~proposal.valid).any(1)
        for at in torch.nonzero(broken).flatten().tolist():
            none = logits[at].amax(1) == _NEVER
            row = self._rows[at]
            row.exhausted = bool(row.params.constraints) and bool((none & asked.wanted[at]).any())

    def written(self, block: Block) -> None:
        """The round has written what it chose."""
        for at, row in enumerate(self._rows):
            if row.params.penalised:
                row.leave(block.ids[at][row.own(block, at)].tolist())
        scored = self._scored
        most = max((row.params.logprobs or 0 for row in self._rows), default=0)
        if scored is None or not most:
            return
        now = block.changed.unsqueeze(1) & (block.written_in == (block.rounds - 1).unsqueeze(1))
        some = now[scored.where]
        lines, best, log_mass = (column[some] for column in scored[1:])
        top = lines.topk(min(most, lines.shape[1]), dim=1)
        values = (top.values - best.unsqueeze(1)) - log_mass.unsqueeze(1)
        places = torch.nonzero(now & scored.where).tolist()
        for (row, place), found in zip(places, _pairs(top.indices, values), strict=True):
            mine = self._rows[row]
            mine.tops[place] = found[: mine.params.logprobs or 0]


def filtered(lines: torch.Tensor, filters: Sequence[Mapping[str, float]]) -> torch.Tensor:
    """Logits [N, V] without what further filters remove; ``filters``: of each line, by name."""
    found: dict[str, dict[int, float]] = {}
    for line, each in enumerate(filters):
        for name, value in each.items():
            found.setdefault(name, {})[line] = value
    if not found:
        return lines
    own = [
        FilterRows(
            name,
            torch.tensor(list(values), device=lines.device),
            torch.tensor(list(values.values()), dtype=torch.float32, device=lines.device),
        )
        for name, values in sorted(found.items())
    ]
    return apply_further(lines, own)


def _pairs(ids: torch.Tensor, values: torch.Tensor) -> Iterator[tuple[tuple[int, float], ...]]:
    for tokens, logprobs in zip(ids.tolist(), values.tolist(), strict=True):
        pairs = zip(tokens, logprobs, strict=True)
        yield tuple((token, logprob) for token, logprob in pairs if logprob > _NEVER)
