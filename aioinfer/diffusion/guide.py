"""Guide: what the parameters of requests change in a round besides temperature, filters and seed.

::

    logits ─► adjust ─► propose ─► steer ─► choose ─► write ─► written
              biases,              grammars: the proposed
              penalties            tokens become a path

Rows that need none of it have no guide and take no part: they are groups of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from aioinfer.diffusion.block import Block
    from aioinfer.diffusion.proposal import Asked, Proposal
    from aioinfer.params import SamplingParams

__all__ = ["Guide", "steered"]


class Guide(Protocol):
    """The guide of R rows in one round; it may read back from the device."""

    #: after :meth:`steer`, [R] bool: the rows for which it needs more time: this round does not count for
    #: them; None: no row
    waits: torch.Tensor | None

    def adjust(self, logits: torch.Tensor, asked: Asked, block: Block) -> None:
        """Change the logits, [R, B, V] float32, in place, before tokens are proposed."""

    def steer(self, logits: torch.Tensor, asked: Asked, proposal: Proposal, block: Block) -> torch.Tensor:
        """Replace proposed tokens and their confidences; ``valid`` is False where a row cannot go on.
        ``logits`` are those of :meth:`adjust`. Returns where the proposals may be written, [R, B] bool."""

    def written(self, block: Block) -> None:
        """The round has written what it chose."""


def steered(params: SamplingParams) -> bool:
    """The rows of a request with these parameters have a guide."""
    constrained = params.masked or bool(params.constraints) or params.logit_bias is not None
    drawn = not params.greedy and bool(params.further_filters)
    return constrained or drawn or params.penalised or bool(params.logprobs)
