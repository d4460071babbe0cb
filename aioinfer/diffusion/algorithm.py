"""Algorithm: from the logits of a forward to the tokens that are written into the blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch

from aioinfer.diffusion.block import Block
from aioinfer.diffusion.proposal import Proposal, propose
from aioinfer.diffusion.rows import Rows
from aioinfer.errors import InvalidRequest
from aioinfer.params import DiffusionParams, SamplingParams

__all__ = ["Algorithm", "ahead", "ranks"]


class Algorithm(ABC):
    """What to write after a forward. A subclass says which of the proposed tokens, in :meth:`choose`.

    The rest is the same for all and done here: the mask id cannot be proposed; what is not editable, rows
    that are done and rows whose logits are broken are not written to; a round's noise is its own. Rows of
    one call have their own parameters, seeds, positions and rounds, and none sees another.

    Nothing is read back from the device and all writing is done in place, so that forward and step can be
    captured in one CUDA graph.
    """

    #: the name in :class:`~aioinfer.params.DiffusionParams`, and of the file
    name: ClassVar[str]
    #: fields of DiffusionParams that mean something here, and what they are when they are not given
    parameters: ClassVar[Mapping[str, float]]
    #: names of integers in the state that start at 0 with every block
    counters: ClassVar[tuple[str, ...]] = ()
    #: a token that is written stays: what is known from the block's start on can be shown at once
    monotone: ClassVar[bool] = True

    def __init__(self, mask_id: int) -> None:
        self._mask_id = mask_id

    @classmethod
    def check(cls, params: DiffusionParams) -> None:
        """Raises InvalidRequest for a parameter that this algorithm would ignore."""
        for name in params.given():
            if name not in cls.parameters:
                raise InvalidRequest(name, f"is not a parameter of {cls.name}")

    @classmethod
    def init_state(
        cls,
        params: Sequence[DiffusionParams],
        sampling: Sequence[SamplingParams],
        seeds: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> Rows:
        """The state of rows at the start of a block, a row per request.

        Callers move it about (:mod:`aioinfer.diffusion.rows`) and look at nothing in it. It is all that a
        row remembers besides its block, so a row goes on wherever both are put.
        """
        state: Rows = {}
        for name, default in cls.parameters.items():
            values = [getattr(each, name) for each in params]
            dtype = torch.int64 if isinstance(default, int) else torch.float32
            filled = [default if value is None else value for value in values]
            state[name] = torch.tensor(filled, dtype=dtype, device=device)
        for name in ("temperature", "top_p", "min_p"):
            values = [getattr(each, name) for each in sampling]
            state[name] = torch.tensor(values, dtype=torch.float32, device=device)
        top_k = [max(0, each.top_k) for each in sampling]
        state["top_k"] = torch.tensor(top_k, dtype=torch.int64, device=device)
        state["seed"] = torch.tensor(list(seeds), dtype=torch.int64, device=device)
        for name in cls.counters:
            state[name] = torch.zeros(len(params), dtype=torch.int64, device=device)
        return state

    def step(
        self, logits: torch.Tensor, block: Block, state: Rows, *, drawn: bool = True, filtered: bool = True
    ) -> torch.Tensor:
        """Write what one forward is good for.

        Args:
            logits: [R, B, V], any float type, of the tokens at the same positions; not written to.
            block: written to.
            state: of :meth:`init_state`; written to.
            drawn: some row has a temperature. The host knows and says so, for a round to cost no more than
                its rows ask for; the tokens are the same if it says so in vain.
            filtered: some row with a temperature has top-k, top-p or min-p. Likewise.

        Returns:
            [R] bool: the block's ``done``. It is true from the step on that writes the last token; whether a
            forward over the final tokens is then still owed is what ``block.changed`` says.
        """
        if not len(block.ids):
            return block.done
        live = ~block.done
        writable = live.unsqueeze(1) & (block.masked if self.monotone else block.editable)
        own = logits.to(torch.float32, copy=True)
        own[..., self._mask_id] = float("-inf")
        own = self.bend(own, block, state)
        proposal = propose(
            own, block.positions, block.rounds, state, drawn=drawn, filtered=drawn and filtered
        )
        broken = (writable & ~proposal.sound).any(1)
        where = self.choose(proposal, block, state) & writable & ~broken.unsqueeze(1)
        block.write_(where, proposal.tokens, proposal.logprobs)
        block.failed |= broken
        block.done |= broken | self.settled(block, state)
        block.rounds += live
        return block.done

    def bend(self, logits: torch.Tensor, block: Block, state: Rows) -> torch.Tensor:
        """The logits to propose from, [R, B, V] float32; those that are given may be written over."""
        return logits

    @abstractmethod
    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        """Where to write what is proposed, [R, B] bool. Where nothing can be written, it may say anything."""

    def settled(self, block: Block, state: Rows) -> torch.Tensor:
        """The rows that will not change any more after what has just been written, [R] bool."""
        return ~block.masked.any(1)

    def due(self, block: Block, state: Rows) -> torch.Tensor:
        """How many tokens this round must find, [R, 1] int64: one, or what is left spread evenly over the
        rounds that are left of the request's ``steps``, the larger shares first."""
        left = block.masked.sum(1)
        rounds = (state["steps"] - block.rounds).clamp(min=1)
        share = (left + rounds - 1) // rounds
        return torch.where(state["steps"] > 0, share, 1).unsqueeze(1)


def ahead(score: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Who comes before whom if some positions are put in falling order of their score, equals by position.

    Args:
        score: [R, B] float32, numbers where it counts.
        among: [R, B] bool, the positions in question.

    Returns:
        [R, B, B] bool: in row r, the last index comes before the middle one. Blocks are short: a comparison
        of all pairs costs less than sorting, and says this as well.
    """
    place = torch.arange(score.shape[1], device=score.device)
    mine, others = score.unsqueeze(2), score.unsqueeze(1)
    first = (others > mine) | ((others == mine) & (place < place.unsqueeze(1)))
    return first & among.unsqueeze(1)


def ranks(score: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """How many come before each in the order of :func:`ahead`, [R, B] int64."""
    return ahead(score, among).sum(2)
