"""JointThreshold: fill masked positions, and replace tokens that were written before."""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, ranks
from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.proposal import Proposal

__all__ = ["JointThreshold"]


class JointThreshold(Algorithm):
    """Fills masked positions as LowConfidence with ``threshold``, and in every round replaces a written token
    where another is proposed with a confidence above ``edit_threshold``.

    A block ends when a round changes nothing, or after ``max_post_edits`` rounds that began without a masked
    position. ``penalty`` is subtracted from the logit of the token one position before, which prevents
    repetition when both positions are filled in one round; the block's first position has no penalty.

    The decoding of LLaDA2.1 (arXiv 2602.08676); names and defaults are SGLang's, and so are the tokens of
    greedy rows (0.5.23), where equal confidences and the mask, which is not proposed here, do not decide.
    There, one more forward finds the edits exhausted; here that is the block's commit.
    """

    name = "joint_threshold"
    parameters: ClassVar = {
        "threshold": 0.5,
        "edit_threshold": 0.0,
        "max_post_edits": 16,
        "penalty": 0.0,
        "steps": 0,
    }
    counters = ("post_edits",)
    monotone = False

    def lowered(self, block: Block, state: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """The token one position before. An unknown one is the mask, which is not proposed anyway."""
        none = torch.full_like(block.ids[:, :1], -1)
        return torch.cat((none, block.ids[:, :-1]), 1), state["penalty"]

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        masked = block.masked
        state["post_edits"] += ~masked.any(1) & ~block.done
        sure = proposal.confidence > state["threshold"].unsqueeze(1)
        fill = masked & (sure | (ranks(proposal.confidence, masked) < self.quota(block, state)))
        other = block.known & (proposal.tokens != block.ids)
        return fill | (other & (proposal.confidence > state["edit_threshold"].unsqueeze(1)))

    def finished(self, block: Block, state: Rows) -> torch.Tensor:
        spent = state["post_edits"] >= state["max_post_edits"]
        return ~block.changed | (~block.masked.any(1) & spent)
