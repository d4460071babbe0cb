"""EntropyBound: write together what says little about each other."""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, ahead
from aioinfer.diffusion.block import Block
from aioinfer.diffusion.proposal import Proposal
from aioinfer.diffusion.rows import Rows

__all__ = ["EntropyBound"]


class EntropyBound(Algorithm):
    """Writes masked positions in rising order of entropy, as long as those before sum up to no more than
    ``entropy_bound`` nats: the first in any case.

    EB-Sampler (Ben-Hamu et al., 2025, arXiv 2505.24857): the sum less the largest bounds what the positions
    can tell of each other, and with it the error of writing them independently. The entropy is that of the
    model's distribution at temperature 1, without filters.
    """

    name = "entropy_bound"
    parameters: ClassVar = {"entropy_bound": 0.15, "steps": 0}

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        entropy = proposal.entropy()
        before = ahead(-entropy, block.masked)
        spent = torch.where(before, entropy.unsqueeze(1), 0.0).sum(2)
        within = spent <= state["entropy_bound"].unsqueeze(1)
        return within | (before.sum(2) < self.due(block, state))
