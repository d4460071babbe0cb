"""LowConfidence: write what the model is sure of."""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, ranks
from aioinfer.diffusion.block import Block
from aioinfer.diffusion.proposal import Proposal
from aioinfer.diffusion.rows import Rows

__all__ = ["LowConfidence"]


class LowConfidence(Algorithm):
    """Writes the masked positions whose confidence is above ``threshold``, and the surest if there is none.

    The name is that of what stays masked. Threshold decoding is Fast-dLLM's (Wu et al., 2025) and LLaDA2's;
    name and default threshold are SGLang's. With ``steps``, at least an even share of what is left is written
    each round, the surest first, as in SDAR's dynamic decoding: a block then takes no more rounds than that.
    """

    name = "low_confidence"
    parameters: ClassVar = {"threshold": 0.95, "steps": 0}

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        sure = proposal.confidence > state["threshold"].unsqueeze(1)
        return sure | (ranks(proposal.confidence, block.masked) < self.due(block, state))
