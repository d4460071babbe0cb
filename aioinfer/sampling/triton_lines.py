"""Lines: the rows of logits that the sampling kernels work on, their parameters, memory and results.

A row of a step's tokens is a line of its own. The rows of diffusion models have a line per position of their
block, which share the row's parameters, and need not all be computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from aioinfer.sampling.batch import SamplingBatch

__all__ = ["SEARCH_CELLS", "Chosen", "Lines", "SampleTuning", "Scratch", "Work", "is_wanted", "lowering"]

#: of the searches of a wide line, by count and by mass: sums for each of 16 pivots of 8 launches,
#: and as many prefixes as launches
SEARCH_CELLS = 2 * 8 * 16 + 2 * 8


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


@dataclass(frozen=True, slots=True)
class SampleTuning:
    """Sizes of the launches, all powers of two. They change no token."""

    #: tokens per program
    chunk: int = 2048
    #: the most groups of tokens in a line; the bound is computed from their maxima
    groups: int = 4096
    #: capacity of a line's list of tokens
    listed: int = 4096
    #: entries that one program loads at a time from a list, from a whole line, and while it searches a part
    #: of one
    list_tile: int = 1024
    row_tile: int = 4096
    wide_tile: int = 256
    num_warps: int = 8


@dataclass(frozen=True, slots=True)
class Work:
    """Features that the launches need. Fewer save work; features that a line does not need change nothing."""

    #: some line has a temperature
    draws: bool = True
    #: some such line has top-k or top-p
    filters: bool = True
    #: several programs search the wide lines of top-p without top-k, or, with both, all wide lines
    wide_nucleus: bool = False
    wide_top_k: bool = False
    #: the mass of the tokens that a token was drawn from
    weighs: bool = False
    #: of the distribution at temperature 1: the sum of the exponentials, and the entropy
    sums: bool = False
    entropy: bool = False


@dataclass(frozen=True, slots=True)
class Chosen:
    """The results of the launches, [N] each; None or arbitrary where it was not asked for. Lines that are
    not computed have a maximum of +inf, and are arbitrary else."""

    #: int64: token ids, BAD_LOGITS for broken lines
    tokens: torch.Tensor
    #: float32: the largest logit; +inf or -inf for broken lines
    peaks: torch.Tensor
    #: int64, in units of :func:`~aioinfer.sampling.filters.mass_unit`: see ``Work.weighs``
    kept: torch.Tensor | None
    #: float32: see ``Work.sums`` and ``Work.entropy``, the latter in nats
    sums: torch.Tensor | None
    entropy: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Scratch:
    """Memory through which the launches pass on their results; empty where it is not needed."""

    #: [N, chunks] float32 and int32: a chunk's maximum, later its largest sum, and the id of the token
    peaks: torch.Tensor
    firsts: torch.Tensor
    #: [N, chunks] float32: sum of exp relative to the chunk's maximum; int64: exact mass
    shares: torch.Tensor
    masses: torch.Tensor
    #: [N, chunks] float64 each: sum of exp relative to the chunk's maximum at temperature 1, and the same
    #: with each addend multiplied by its logit
    weights: torch.Tensor
    moments: torch.Tensor
    #: [N, chunks, groups] float32
    maxima: torch.Tensor
    #: [N] float32 and int32: bound, and length of the list of a line
    bounds: torch.Tensor
    lengths: torch.Tensor
    #: [N, listed] float32 and int32: logits above the bound, and their token ids
    entries: torch.Tensor
    entry_ids: torch.Tensor
    #: [N, SEARCH_CELLS] int64
    cells: torch.Tensor

    @classmethod
    def make(
        cls, lines: int, chunks: int, groups: int, listed: int, work: Work, device: torch.device
    ) -> Scratch:
        """Uninitialised memory."""

        def empty(size: int, dtype: torch.dtype, needed: bool) -> torch.Tensor:
            return torch.empty(lines * size if needed else 0, dtype=dtype, device=device)

        draws, filters = work.draws, work.draws and work.filters
        return cls(
            peaks=empty(chunks, torch.float32, True),
            firsts=empty(chunks, torch.int32, True),
            shares=empty(chunks, torch.float32, filters),
            masses=empty(chunks, torch.int64, draws),
            weights=empty(chunks, torch.float64, work.sums),
            moments=empty(chunks, torch.float64, work.entropy),
            maxima=empty(chunks * groups, torch.float32, filters),
            bounds=empty(1, torch.float32, filters),
            lengths=empty(1, torch.int32, filters),
            entries=empty(listed, torch.float32, filters),
            entry_ids=empty(listed, torch.int32, filters),
            cells=empty(SEARCH_CELLS, torch.int64, filters and (work.wide_nucleus or work.wide_top_k)),
        )


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
