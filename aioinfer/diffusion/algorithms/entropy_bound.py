"""EntropyBound: write positions together that are nearly independent."""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, precedes
from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.proposal import Proposal

__all__ = ["EntropyBound"]


class EntropyBound(Algorithm):
    """Writes masked positions in rising order of entropy, as long as the entropies of the positions before
    sum up to at most ``entropy_bound`` nats; the first in any case.

    EB-Sampler (Ben-Hamu et al., 2025, arXiv 2505.24857): the sum without the largest entropy bounds the
    mutual information of the positions, and with it the error of writing them independently. The entropy is
    that of the model's distribution at temperature 1, without filters.
    """

    name = "entropy_bound"
    parameters: ClassVar = {"entropy_bound": 0.15, "steps": 0}
    needs_entropy = True

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        entropy = proposal.entropy
        assert entropy is not None, "it was asked for"
        before = precedes(-entropy, block.masked)
        spent = torch.where(before, entropy.unsqueeze(1), 0.0).sum(2)
        within = spent <= state["entropy_bound"].unsqueeze(1)
        return within | (before.sum(2) < self.quota(block, state))
