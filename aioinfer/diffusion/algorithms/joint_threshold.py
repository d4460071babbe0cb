"""JointThreshold: fill masks, and change one's mind about what is filled."""

from __future__ import annotations

from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, ranks
from aioinfer.diffusion.block import Block
from aioinfer.diffusion.proposal import Proposal
from aioinfer.diffusion.rows import Rows

__all__ = ["JointThreshold"]


class JointThreshold(Algorithm):
    """Mask to token as LowConfidence with ``threshold``; and token to token: in every round, a token of the
    answer is replaced where another is proposed with a confidence above ``edit_threshold``.

    A block ends when a round changes nothing, or after ``max_post_edits`` rounds that began without a mask.
    ``penalty`` is taken off the logit of the token one position before, which keeps a model that fills both
    at once from stuttering; the block's first position has none.

    The decoding of LLaDA2.1 (arXiv 2602.08676); names and defaults are SGLang's. There, a round that changes
    nothing and one that finds the edits used up are followed by another forward over the same tokens. Here,
    the first leaves a block that is done and committed, and the second is not computed.
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

    def bend(self, logits: torch.Tensor, block: Block, state: Rows) -> torch.Tensor:
        before = block.ids[:, :-1].unsqueeze(2)
        penalty = state["penalty"].view(-1, 1, 1).expand(before.shape)
        # Where the token before is not known it is the mask, whose logit is -inf and stays so.
        logits[:, 1:].scatter_add_(2, before, -penalty)
        return logits

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        masked = block.masked
        state["post_edits"] += ~masked.any(1) & ~block.done
        sure = proposal.confidence > state["threshold"].unsqueeze(1)
        fill = masked & (sure | (ranks(proposal.confidence, masked) < self.due(block, state)))
        other = block.known & (proposal.tokens != block.ids)
        return fill | (other & (proposal.confidence > state["edit_threshold"].unsqueeze(1)))

    def settled(self, block: Block, state: Rows) -> torch.Tensor:
        spent = state["post_edits"] >= state["max_post_edits"]
        return ~block.changed | (~block.masked.any(1) & spent)
