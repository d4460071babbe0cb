"""Algorithm: writes tokens into blocks, from the logits of a forward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch

from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.guide import Guide
from aioinfer.diffusion.proposal import Asked, Proposal, Propose
from aioinfer.diffusion.proposal import propose as torch_propose
from aioinfer.errors import InvalidRequest
from aioinfer.params import DiffusionParams, SamplingParams

__all__ = ["Algorithm", "precedes", "ranks"]


class Algorithm(ABC):
    """A decoding algorithm: after each forward of a block, the *round*, it writes some of the proposed
    tokens.

    A subclass chooses them in :meth:`choose`. This class does the rest: it proposes any token but the mask
    id, does not write to positions that are not editable, to rows that are done and to rows with broken
    logits, and draws new noise in each round. Rows of one call have their own parameters, seeds, positions
    and rounds, and do not affect each other.

    Nothing is read back from the device and all writing is done in place, so that forward and step can be
    captured in one CUDA graph.
    """

    #: the name in :class:`~aioinfer.params.DiffusionParams`, and of the file
    name: ClassVar[str]
    #: the fields of DiffusionParams that the algorithm uses, and their defaults
    parameters: ClassVar[Mapping[str, float]]
    #: names of integers in the state that are 0 at the start of every block
    counters: ClassVar[tuple[str, ...]] = ()
    #: integers per position in the state, ``history`` [R, B, n], that are 0 at the start of every block
    history: ClassVar[int] = 0
    #: whether tokens move within a block: only models with tokens that delete and split can have that
    moves: ClassVar[bool] = False
    #: whether a written token is never replaced: then the known prefix of a block can be streamed at once
    monotone: ClassVar[bool] = True
    #: whether it is for canvases (DiffusionGemma): a model has either these or blocks of masks
    canvas: ClassVar[bool] = False
    #: whether grammars, biases and penalties can be applied to what it proposes
    steerable: ClassVar[bool] = True
    #: whether :meth:`choose` looks at the entropy of positions
    needs_entropy: ClassVar[bool] = False

    def __init__(
        self, mask_id: int, propose: Propose | None = None, edit_ids: tuple[int, int] | None = None
    ) -> None:
        """``propose``: kernels that propose tokens; None for torch's operations. ``edit_ids``: the tokens
        that delete and split, for an algorithm that ``moves``."""
        self._mask_id = mask_id
        self._propose = propose or torch_propose
        self._edit_ids = edit_ids

    @classmethod
    def check(cls, params: DiffusionParams) -> None:
        """Raise InvalidRequest for a parameter that this algorithm does not use."""
        for name in params.given():
            if name not in cls.parameters:
                raise InvalidRequest(name, f"is not a parameter of {cls.name}")

    @classmethod
    def private(cls, size: int) -> int:
        """The number of integers in the state of a block of ``size`` positions that rounds write."""
        return len(cls.counters) + cls.history * size

    @classmethod
    def init_state(
        cls,
        params: Sequence[DiffusionParams],
        sampling: Sequence[SamplingParams],
        seeds: Sequence[int],
        size: int = 0,
    ) -> Rows:
        """The state of rows at the start of a block of ``size`` positions, one row per request; [R] each,
        by name, and ``history``.

        State and block are all that a row needs to continue. Callers may move them to other rows or devices,
        and need not interpret the state.
        """
        state: Rows = {}
        for name, default in cls.parameters.items():
            values = [getattr(each, name) for each in params]
            dtype = torch.int64 if isinstance(default, int) else torch.float32
            filled = [default if value is None else value for value in values]
            state[name] = torch.tensor(filled, dtype=dtype)
        for name in ("temperature", "top_p", "min_p"):
            values = [getattr(each, name) for each in sampling]
            state[name] = torch.tensor(values, dtype=torch.float32)
        top_k = [max(0, each.top_k) for each in sampling]
        state["top_k"] = torch.tensor(top_k, dtype=torch.int64)
        state["seed"] = torch.tensor(list(seeds), dtype=torch.int64)
        for name in cls.counters:
            state[name] = torch.zeros(len(params), dtype=torch.int64)
        if cls.history:
            state["history"] = torch.zeros(len(params), size, cls.history, dtype=torch.int64)
        return state

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
        """Write tokens after one forward.

        Args:
            logits: [R, B, V], any floating dtype, of the tokens at the same positions; not written to
                without a guide.
            block: written to.
            state: of :meth:`init_state`; written to.
            drawn: whether any row has a temperature above 0. The host knows it and passes it to save work;
                True gives the same tokens if none has.
            filtered: whether any row with a temperature has top-k, top-p or min-p; in the same way.
            guide: of rows whose parameters decide more than that; the logits are float32 then, and their own.

        Returns:
            [R] bool: the block's ``done``, true from the step that writes the last token on.
            ``block.changed`` states whether one more forward, over the final tokens, is needed for their K/V.
        """
        if not len(block.ids):
            return block.done
        live = ~block.done
        writable = live.unsqueeze(1) & (block.masked if self.monotone else block.editable)
        asked = self.asked(block, state, writable, drawn, filtered)
        if guide is not None:
            guide.adjust(logits, asked, block)
        proposal, choices = self._propose(logits, asked), block
        if guide is not None:
            writable = guide.steer(logits, asked, proposal, block) & writable
            # A position that is not written now takes no share of what a round writes.
            choices = replace(block, editable=block.editable & (writable | block.known))
        waits = None if guide is None else guide.waits
        if waits is not None:
            # As if they were done, for a while.
            waits = waits & live
            live, writable = live & ~waits, writable & ~waits.unsqueeze(1)
            block.done |= waits
        broken = (writable & ~proposal.valid).any(1)
        where = self.choose(proposal, choices, state) & writable & ~broken.unsqueeze(1)
        block.write_(where, proposal.tokens, proposal.logprobs)
        block.failed |= broken
        block.done |= broken | self.finished(block, state)
        block.rounds += live
        if waits is not None:
            block.done &= ~waits
        if guide is not None:
            guide.written(block)
        return block.done

    def asked(self, block: Block, state: Rows, wanted: torch.Tensor, drawn: bool, filtered: bool) -> Asked:
        """What is proposed at the positions ``wanted``, [R, B] bool."""
        return Asked(
            positions=block.positions,
            rounds=block.rounds,
            sampling=state,
            wanted=wanted,
            mask_id=self._mask_id,
            lowered=self.lowered(block, state),
            entropy=self.needs_entropy,
            drawn=drawn,
            filtered=drawn and filtered,
        )

    def lowered(self, block: Block, state: Rows) -> tuple[torch.Tensor, torch.Tensor] | None:
        """One token of each position, [R, B] int64, -1 for none, whose logit is lowered before tokens are
        proposed, and how much, [R] float32; None: nothing is lowered."""
        return None

    @abstractmethod
    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        """The positions where the proposed tokens are written, [R, B] bool. Positions that must not be
        written are ignored."""

    def finished(self, block: Block, state: Rows) -> torch.Tensor:
        """The rows whose tokens are final after this round's writing, [R] bool."""
        return ~block.masked.any(1)

    def quota(self, block: Block, state: Rows) -> torch.Tensor:
        """The fewest tokens that this round must write, [R, 1] int64: one, or, with the parameter ``steps``,
        the masked positions spread evenly over the remaining rounds, the larger shares first."""
        left = block.masked.sum(1)
        rounds = (state["steps"] - block.rounds).clamp(min=1)
        share = (left + rounds - 1) // rounds
        return torch.where(state["steps"] > 0, share, 1).unsqueeze(1)


def precedes(score: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Compare all pairs of positions by falling score, equal scores by position.

    Blocks are short: comparing all pairs costs less than sorting.

    Args:
        score: [R, B] float32, not NaN at ``among``.
        among: [R, B] bool, the positions that are ordered.

    Returns:
        [R, B, B] bool: entry [r, i, j] is true if, in row r, position j is in ``among`` and precedes i
    """
    place = torch.arange(score.shape[1], device=score.device)
    mine, others = score.unsqueeze(2), score.unsqueeze(1)
    first = (others > mine) | ((others == mine) & (place < place.unsqueeze(1)))
    return first & among.unsqueeze(1)


def ranks(score: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """The rank of each position in the order of :func:`precedes`, from 0: [R, B] int64."""
    return precedes(score, among).sum(2)
