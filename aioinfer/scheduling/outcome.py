"""Outcome: the results of one step, as the scheduler reads them. Imports no numpy, as devices refer to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aioinfer.diffusion.state import BlockState

__all__ = ["Outcome"]


@dataclass(slots=True)
class Outcome:
    """Results of a computed step, as the scheduler reads them; a device's StepResult has more."""

    #: one entry per row: the sampled token, or one of :mod:`aioinfer.sampling.outcomes`
    tokens: list[int]
    #: by row, the tokens that follow without having been sampled
    forced: dict[int, list[int]] = field(default_factory=dict)
    #: by row, of those that denoise
    blocks: dict[int, BlockState] = field(default_factory=dict)
    #: forwards that the step took
    rounds: int = 1
    #: by row, of those with drafts that sampled: its tokens, from the one in ``tokens`` on. The last entry
    #: may be one of the outcomes, which then stands for the token after the others
    runs: dict[int, list[int]] = field(default_factory=dict)
    #: by row, of those that pool: what was pooled, as the request's Pooling says
    pooled: dict[int, Any] = field(default_factory=dict)
