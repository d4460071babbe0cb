"""StaticSteps: a block takes a given number of rounds."""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, ranks
from aioinfer.diffusion.block import Block
from aioinfer.diffusion.proposal import Proposal
from aioinfer.diffusion.rows import Rows

__all__ = ["StaticSteps"]


class StaticSteps(Algorithm):
    """Writes a fixed share of the masked positions each round, the surest first, whatever their confidence.

    Of n positions in ``steps`` rounds, each writes n // steps, and the first n % steps one more: the low
    confidence remasking of LLaDA (Nie et al., 2025). Without ``steps``, one position a round.
    """

    name = "static_steps"
    parameters: ClassVar = {"steps": 0}

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        return ranks(proposal.confidence, block.masked) < self.due(block, state)
