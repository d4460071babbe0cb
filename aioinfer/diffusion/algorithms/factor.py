"""Factor: the more positions are written together, the surer the model has to be."""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, ranks
from aioinfer.diffusion.block import Block
from aioinfer.diffusion.proposal import Proposal
from aioinfer.diffusion.rows import Rows

__all__ = ["Factor"]


class Factor(Algorithm):
    """Writes the n surest masked positions, for the largest n such that the i-th of them, from 1 on, has
    a confidence c_i with (i + 1) * (1 - c_i) <= ``factor``. The first is written in any case.

    The rule of Fast-dLLM (Wu et al., 2025), from its bound on when decoding in parallel is the same as one by
    one. Confidence falls with i and what is asked of it rises, so who passes has everybody before him pass.
    """

    name = "factor"
    parameters: ClassVar = {"factor": 1.0, "steps": 0}

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        rank = ranks(proposal.confidence, block.masked)
        asked = 1 - state["factor"].unsqueeze(1) / (rank + 2)
        return (proposal.confidence >= asked) | (rank < self.due(block, state))
