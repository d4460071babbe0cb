"""JointThresholdIndel: fill masked positions, replace, delete and insert tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, ranks
from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.guide import Guide
from aioinfer.diffusion.proposal import Proposal

__all__ = ["JointThresholdIndel"]

#: Each position remembers the last tokens that were chosen there, in words of three.
_WORDS, _PER_WORD, _BITS = 3, 3, 21
_HASH_BITS = (1 << 62) - 1
_MULTIPLIERS = -0x61C8864680B583EB, -0x4B47D0C5A1A6A5D3


class JointThresholdIndel(Algorithm):
    """Edits as JointThreshold, by two tokens of the model more: where DELETE is chosen, the position goes and
    the rest of the block moves up; where SPLIT is, a mask is inserted before the token there, and what moves
    past the block's end is lost. The prompt's tokens stay where they are.

    A round fills the masked positions of a confidence above ``threshold``, and at least so many that one of
    them is no inserted mask; all, once there are only such. It replaces tokens as JointThreshold does. If the
    block's tokens were seen before, the least confident change is to the likeliest token that was not chosen
    there yet. A block ends when nothing changes. A round is the last one, with neither DELETE nor SPLIT, if
    it is the ``max_post_edits``-th that began without a mask of the first round, or the last that B positions
    and these edits may take.

    The decoding of LLaDA2.2, as SGLang's JointThresholdInDel (0.5.23) defines it, with four differences. The
    mask is never proposed, so a token does not become a mask again. Rows with a temperature sample. Of the
    blocks that were seen the last B are known, and of the tokens that were chosen at a position the last 9.
    """

    name = "joint_threshold_indel"
    parameters: ClassVar = {"threshold": 0.5, "edit_threshold": 0.0, "max_post_edits": 16, "steps": 0}
    counters = ("post_edits",)
    #: a hash of one block that was seen, and the tokens that were chosen at the position
    history = 1 + _WORDS
    moves = True
    steerable = False
    monotone = False

    def step(
        self,
        logits: torch.Tensor,
        block: Block,
        state: Rows,
        *,
        drawn: bool = True,
        filtered: bool = True,
        guide: Guide | None = None,
    ) -> torch.Tensor:
        assert guide is None, "requests that need one are refused"
        if not len(block.ids):
            return block.done
        live = ~block.done
        writable = live.unsqueeze(1) & block.editable
        asked = self.asked(block, state, writable, drawn, filtered)
        proposal = self._propose(logits, asked)
        failed = (writable & ~proposal.valid).any(1)
        last = self._last(block, state)
        where = self.choose(proposal, block, state) & writable & ~failed.unsqueeze(1)
        # Without edits afterwards, the round that fills the last masks of the first round is the last one.
        unfilled = self._original(block) & ~where
        last |= (state["max_post_edits"] == 0) & ~unfilled.any(1)
        where |= writable & block.masked & (last & ~failed).unsqueeze(1)
        # Some tokens may not be: what is banned is not written to the caller's logits.
        forbidden = where & last.unsqueeze(1) & self._special(proposal.tokens)
        again, at = self._loops(proposal, where, block, state)
        again &= ~last
        place = torch.arange(where.shape[1], device=where.device)
        wanted = forbidden | (again.unsqueeze(1) & (place == at.unsqueeze(1)))
        banned = self._banned(logits, last, again, at, state)
        other = self._propose(banned, replace(asked, wanted=wanted))
        failed |= (forbidden & ~other.valid).any(1)
        where &= ~failed.unsqueeze(1)
        instead = wanted & other.valid
        tokens = torch.where(instead, other.tokens, proposal.tokens)
        self._remember(where, tokens, block, state)
        before = block.ids.clone()
        self._write(where, tokens, torch.where(instead, other.logprobs, proposal.logprobs), block)
        block.changed.copy_((block.ids != before).any(1))
        block.failed |= failed
        block.done |= failed | last | ~where.any(1)
        block.rounds += live
        return block.done

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        masked, original = block.masked, self._original(block)
        sure = proposal.confidence > state["threshold"].unsqueeze(1)
        inserted = (masked & ~original).sum(1, keepdim=True)
        least = torch.maximum(inserted + 1, self.quota(block, state))
        rank = ranks(proposal.confidence, masked)
        fill = masked & (sure | (rank < least) | ~original.any(1, keepdim=True))
        other = block.known & (proposal.tokens != block.ids)
        return fill | (other & (proposal.confidence > state["edit_threshold"].unsqueeze(1)))

    def _last(self, block: Block, state: Rows) -> torch.Tensor:
        """Count the round; whether a row's round is its last whatever it chooses, [R] bool."""
        filled = ~self._original(block).any(1)
        state["post_edits"] += filled & ~block.done
        most = state["max_post_edits"]
        spent = torch.where(most > 0, state["post_edits"] >= most, filled)
        return ~block.done & (spent | (block.rounds >= block.ids.shape[1] + most))

    def _original(self, block: Block) -> torch.Tensor:
        """[R, B] bool: masks of the first round. Those that came later have the round."""
        return block.masked & (block.written_in < 0)

    def _special(self, tokens: torch.Tensor) -> torch.Tensor:
        assert self._edit_ids is not None, "the model has no tokens that delete and split"
        delete, split = self._edit_ids
        return (tokens == delete) | (tokens == split)

    def _loops(
        self, proposal: Proposal, where: torch.Tensor, block: Block, state: Rows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows whose blocks were seen before and change, [R] bool, and the position of their least
        confident change, [R] int64."""
        changes = where & (proposal.tokens != block.ids)
        seen = (state["history"][..., 0] == _hashed(block.ids)).any(1)
        confidence = torch.where(changes, proposal.confidence, float("inf"))
        return seen & changes.any(1), confidence.argmin(1)

    def _banned(
        self, logits: torch.Tensor, last: torch.Tensor, again: torch.Tensor, at: torch.Tensor, state: Rows
    ) -> torch.Tensor:
        """A copy of the logits without DELETE and SPLIT in the last rounds of rows, and without the tokens
        that were chosen before at the position ``at`` of the rows ``again``."""
        assert self._edit_ids is not None, "the model has no tokens that delete and split"
        rows, _, vocab = logits.shape
        banned, never = logits.clone(memory_format=torch.contiguous_format), float("-inf")
        for token in self._edit_ids:
            banned[..., token].masked_fill_(last.unsqueeze(1), never)
        chosen = _unpacked(state["history"][torch.arange(rows, device=at.device), at, 1:])
        # The mask stands for none: it is not proposed anyway.
        tried = torch.where((chosen > 0) & again.unsqueeze(1), chosen - 1, self._mask_id).clamp_(
            max=vocab - 1
        )
        banned.view(rows, -1).scatter_(1, at.unsqueeze(1) * vocab + tried, never)
        return banned

    def _remember(self, where: torch.Tensor, tokens: torch.Tensor, block: Block, state: Rows) -> None:
        """The block, in the place of the one B rounds ago, and the tokens, each before the others of its
        position."""
        history, size = state["history"], block.ids.shape[1]
        place = torch.arange(size, device=where.device)
        mine = (place == (block.rounds % size).unsqueeze(1)) & where.any(1, keepdim=True)
        history[..., 0].copy_(torch.where(mine, _hashed(block.ids).expand(-1, size), history[..., 0]))
        chosen, new = _unpacked(history[..., 1:]), tokens.unsqueeze(2) + 1
        # Those before it, or before the free place, move by one.
        order = torch.arange(chosen.shape[2], device=where.device)
        found = torch.where(chosen == new, order, chosen.shape[2]).amin(2, keepdim=True)
        moved = torch.where(order <= found, chosen.roll(1, 2), chosen)
        moved[..., :1] = new
        history[..., 1:].copy_(torch.where(where.unsqueeze(2), _packed(moved), history[..., 1:]))

    def _write(self, where: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor, block: Block) -> None:
        """Write tokens, delete and split."""
        assert self._edit_ids is not None, "the model has no tokens that delete and split"
        deleted, split = (where & (tokens == token) for token in self._edit_ids)
        plain = where & ~deleted & ~split & (block.masked | (tokens != block.ids))
        block.write_(plain, tokens, logprobs)
        size = where.shape[1]
        taken = 1 - deleted.long() + split.long()
        to = taken.cumsum(1) - taken + split.long()
        # What is deleted, or lies beyond the end, goes to a place that is not read.
        to = torch.where(deleted | (to >= size), size, to)
        source = torch.full((len(where), size + 1), -1, device=where.device)
        source.scatter_(1, to, torch.arange(size, device=where.device).expand_as(to))
        source = source[:, :size]
        kept, source = source >= 0, source.clamp(min=0)
        rounds = block.rounds.unsqueeze(1)
        for column, blank in (
            (block.ids, self._mask_id),
            (block.known, False),
            (block.logprobs, 0.0),
            (block.written_in, rounds),
        ):
            column.copy_(torch.where(kept, column.gather(1, source), blank))


def _hashed(ids: torch.Tensor) -> torch.Tensor:
    """[R, 1] int64, from 1 on, of blocks [R, B]."""
    first, second = _MULTIPLIERS
    mixed = (ids + 1) * first
    mixed = (mixed ^ (mixed >> 29)) * (torch.arange(ids.shape[1], device=ids.device) * 2 + 1) * second
    mixed = (mixed ^ (mixed >> 32)) * first
    return (mixed.sum(1, keepdim=True) & _HASH_BITS) | 1


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Tokens [..., 9], 0 for none, else one more, from words [..., 3]."""
    shifts = torch.arange(_PER_WORD, device=words.device) * _BITS
    return ((words.unsqueeze(-1) >> shifts) & ((1 << _BITS) - 1)).flatten(-2)


def _packed(tokens: torch.Tensor) -> torch.Tensor:
    shifts = torch.arange(_PER_WORD, device=tokens.device) * _BITS
    return (tokens.reshape(*tokens.shape[:-1], _WORDS, _PER_WORD) << shifts).sum(-1)
