"""StaticSteps: a fixed number of rounds per block."""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, ranks
from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.proposal import Proposal

__all__ = ["StaticSteps"]


class StaticSteps(Algorithm):
    """Writes a fixed share of the masked positions each round, in falling order of confidence.

    Of n positions in ``steps`` rounds, each round writes n // steps, and the first n % steps one more: the
    low confidence remasking of LLaDA (Nie et al., 2025). Without ``steps``, each round writes one position.
    """

    name = "static_steps"
    parameters: ClassVar = {"steps": 0}

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        return ranks(proposal.confidence, block.masked) < self.quota(block, state)
