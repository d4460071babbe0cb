"""Canvas: the blocks of DiffusionGemma in one step.

The model has two passes with the same weights. The *encoder* is causal and reads tokens: prompts, and the
final tokens of canvases, whose keys and values it writes. The *decoder* reads a canvas: all of its positions
see each other and what comes before, and besides its tokens it has the last round's distribution of each
position (self-conditioning). Its keys and values are scratch. Passes differ in what they see, in the input of
the first layer and in the scale of each layer, so that tokens of both are computed in one forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Canvas"]


@dataclass(slots=True)
class Canvas:
    """K canvases of B positions, on the device. Which of them the decoder computes, the host need not
    know."""

    #: [K, B] int64: indices of their tokens in the batch
    tokens: torch.Tensor
    #: [K] bool: computed by the decoder; the others, whose tokens are final, by the encoder
    drafts: torch.Tensor
    #: [K] float32, above 0: of the distributions that the next round reads
    temperatures: torch.Tensor
    #: [K, B, hidden]: the distributions of the last round, as the means of the vectors of tokens under them;
    #: 0 before the first. The forward replaces them by those of its own logits
    vectors: torch.Tensor
    #: of all T tokens of the batch, int64: windows are counted back from here, and the first position behind
    #: what the token sees
    anchors: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(
        cls,
        positions: torch.Tensor,
        tokens: torch.Tensor,
        drafts: torch.Tensor,
        temperatures: torch.Tensor,
        vectors: torch.Tensor,
    ) -> Canvas:
        """``positions``: [T], of all tokens of the batch."""
        size, flat = tokens.shape[1], tokens.reshape(-1)
        own = positions[tokens]
        starts, by_decoder = own[:, :1], drafts.unsqueeze(1)
        anchors = torch.where(by_decoder, starts, own)
        ends = torch.where(by_decoder, starts + size, own + 1)
        return cls(
            tokens=tokens,
            drafts=drafts,
            temperatures=temperatures,
            vectors=vectors,
            anchors=positions.index_copy(0, flat, anchors.reshape(-1)),
            ends=(positions + 1).index_copy(0, flat, ends.reshape(-1)),
        )
