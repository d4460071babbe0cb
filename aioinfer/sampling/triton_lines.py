"""Lines: the rows of logits that the sampling kernels work on, and what is asked for each.

A row of a step's tokens is a line of its own. The rows of diffusion models have a line per position of their
block, which share the row's parameters, and need not all be computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from aioinfer.sampling.batch import SamplingBatch

__all__ = ["Lines", "is_wanted", "lowering"]


@dataclass(frozen=True, slots=True)
class Lines:
    """N lines of logits, and the parameters of N / ``per`` rows."""

    #: [N, V] of any floating dtype, the tokens of a line contiguous
    logits: torch.Tensor
    #: [N / per] each
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seeds: torch.Tensor
    #: [N] int64
    positions: torch.Tensor
    #: lines of a row
    per: int = 1
    #: a token that is never chosen, -1 for none
    banned: int = -1
    #: [N] int64 and [N / per] float32: one token per line, or -1, and how much its logit is lowered
    lowered: torch.Tensor | None = None
    by: torch.Tensor | None = None
    #: [N] uint8, 0 for a line that is not computed; None: all are
    wanted: torch.Tensor | None = None

    @classmethod
    def of(cls, logits: torch.Tensor, batch: SamplingBatch) -> Lines:
        """A line per row of a batch."""
        logits = logits if logits.stride(1) == 1 else logits.contiguous()
        return cls(
            logits=logits,
            temperature=batch.temperature.contiguous(),
            top_k=batch.top_k.contiguous(),
            top_p=batch.top_p.contiguous(),
            min_p=batch.min_p.contiguous(),
            seeds=batch.seeds.contiguous(),
            positions=batch.positions.contiguous(),
        )

    @property
    def filters(self) -> tuple[torch.Tensor, ...]:
        """Temperature, top-k and top-p."""
        return self.temperature, self.top_k, self.top_p

    @property
    def noise(self) -> tuple[torch.Tensor, ...]:
        """Further arguments of a draw: min-p, and the keys of the noise."""
        return self.min_p, self.seeds, self.positions

    @property
    def changes(self) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        """Changes of the logits when they are read."""
        return self.lowered, self.by, self.banned

    @property
    def adjusted(self) -> bool:
        return self.banned >= 0 or self.lowered is not None


@triton.jit
def lowering(
    lowered: tl.tensor | None, by: tl.tensor | None, line: tl.tensor, PER: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The token of a line whose logit is lowered, -1 for none, and how much."""
    name = tl.full([], -1, tl.int32)
    amount = tl.full([], 0.0, tl.float32)
    if lowered is not None:
        name = tl.load(lowered + line).to(tl.int32)
        amount = tl.load(by + line // PER)
    return name, amount


@triton.jit
def is_wanted(wanted: tl.tensor | None, line: tl.tensor) -> tl.tensor:
    """0 for a line that is not computed."""
    found = tl.full([], 1, tl.int32)
    if wanted is not None:
        found = tl.load(wanted + line).to(tl.int32)
    return found
