"""Factor: the more positions are written together, the higher the confidence that is required."""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, ranks
from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.proposal import Proposal

__all__ = ["Factor"]


class Factor(Algorithm):
    """Writes the n masked positions of highest confidence, for the largest n such that the i-th of them, from
    1 on, has a confidence c_i with (i + 1) * (1 - c_i) <= ``factor``. The first is written in any case.

    The rule of Fast-dLLM (Wu et al., 2025), which follows from its bound on when parallel decoding equals
    sequential decoding. The confidence falls with i and the required one rises, so if a position meets it,
    all positions before it do.
    """

    name = "factor"
    parameters: ClassVar = {"factor": 1.0, "steps": 0}

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        rank = ranks(proposal.confidence, block.masked)
        asked = 1 - state["factor"].unsqueeze(1) / (rank + 2)
        return (proposal.confidence >= asked) | (rank < self.quota(block, state))
