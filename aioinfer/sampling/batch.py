"""SamplingBatch: the sampling parameters of the rows that sample in one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["WIDE_TOP_K", "FilterRows", "PenaltyReset", "SamplingBatch"]

#: up to this top-k, a list of the likeliest tokens nearly always has all that it keeps
WIDE_TOP_K = 1024


@dataclass(frozen=True, slots=True)
class PenaltyReset:
    """A request took this slot: replace the token counts of the slot's previous request."""

    slot: int
    #: tokens of the prompt, and tokens generated so far: the initial counts
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    #: whether the request has penalties; without, the slot gets no counts
    penalised: bool = True


@dataclass(frozen=True, slots=True)
class FilterRows:
    """Rows that a filter of :mod:`aioinfer.sampling.further_filters` applies to."""

    #: of its file, and of the field of SamplingParams
    name: str
    #: [R] int64 index of the row in the batch
    rows: torch.Tensor
    #: [R] float32 parameter of the row
    values: torch.Tensor


@dataclass(slots=True)
class SamplingBatch:
    """One entry per sampling row, in the order of ``Batch.logits_rows``; tensors on the logits' device.

    The flags are computed on the host from the same parameters, so that a step skips what none of its rows
    uses without reading the device.
    """

    #: [S] int64 slot of the row
    slots: torch.Tensor
    #: [S] int64 position of the sampled token in its sequence; with the seed it keys the noise
    positions: torch.Tensor
    #: [S] int64
    seeds: torch.Tensor
    #: [S] float32, 0 = greedy
    temperature: torch.Tensor
    #: [S] float32 in (0, 1]
    top_p: torch.Tensor
    #: [S] float32 in [0, 1], 0 = off
    min_p: torch.Tensor
    #: [S] int64, 0 = off
    top_k: torch.Tensor
    #: [S] float32 each
    repetition_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    #: every row is greedy: no noise is computed
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_penalty: bool
    #: hints for kernels that search a row for its filters' threshold: some row with a temperature has top-p
    #: and no top-k, or a top-k above WIDE_TOP_K. Without the hint such a row may take a millisecond or two
    wide_nucleus: bool = False
    wide_top_k: bool = False
    #: [K] and [K] int64: (row, token id) pairs that must not be sampled (end tokens before min_tokens)
    banned_rows: torch.Tensor | None = None
    banned_ids: torch.Tensor | None = None
    penalty_resets: list[PenaltyReset] = field(default_factory=list)
    #: filters that the kernels do not have, applied in this order before the others
    filters: Sequence[FilterRows] = ()
