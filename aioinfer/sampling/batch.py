"""SamplingBatch: the parameters of the rows that sample in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["PenaltyReset", "SamplingBatch"]


@dataclass(frozen=True, slots=True)
class PenaltyReset:
    """A request took this slot: with penalties, start its counts from what was said so far; without, forget
    those of the slot's tenant before."""

    slot: int
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    penalised: bool = True


@dataclass(slots=True)
class SamplingBatch:
    """One entry per sampling row, in the order of ``Batch.logits_rows``; tensors on the logits' device.

    The flags are computed on the host from the same parameters, so that a step pays only for what its
    rows use and nothing is read back from the device to find out.
    """

    #: [S] int64 slot of the row
    slots: torch.Tensor
    #: [S] int64 position in its sequence of the token to be sampled: keys the noise, with the seed
    positions: torch.Tensor
    #: [S] int64
    seeds: torch.Tensor
    #: [S] float32, 0 = greedy
    temperature: torch.Tensor
    #: [S] float32 in (0, 1]
    top_p: torch.Tensor
    #: [S] float32
    min_p: torch.Tensor
    #: [S] int64, 0 = off
    top_k: torch.Tensor
    #: [S] float32 each
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    #: every row is greedy: nothing is drawn
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool
    #: [K] and [K] int64: (row, token id) pairs that must not be sampled (end tokens before min_tokens)
    banned_rows: torch.Tensor | None = None
    banned_ids: torch.Tensor | None = None
    penalty_resets: list[PenaltyReset] = field(default_factory=list)
