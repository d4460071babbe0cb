"""LowConfidence: write the positions of high confidence."""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, ranks
from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.proposal import Proposal

__all__ = ["LowConfidence"]


class LowConfidence(Algorithm):
    """Writes the masked positions whose confidence is above ``threshold``; the one of highest confidence if
    there is none.

    The name refers to the positions that stay masked. Threshold decoding is Fast-dLLM's (Wu et al., 2025) and
    LLaDA2's; name and default threshold are SGLang's. With ``steps``, each round writes at least an even
    share of the masked positions, as in SDAR's dynamic decoding: a block then takes at most ``steps`` rounds.
    """

    name = "low_confidence"
    parameters: ClassVar = {"threshold": 0.95, "steps": 0}

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        sure = proposal.confidence > state["threshold"].unsqueeze(1)
        return sure | (ranks(proposal.confidence, block.masked) < self.quota(block, state))
