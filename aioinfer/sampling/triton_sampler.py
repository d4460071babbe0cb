"""Sampling in Triton: one token per row, from the logits and sampling parameters of rows.

There are four launches, whose grids and arguments follow from shapes alone, so that a CUDA graph can capture
them. A row is cut into chunks of ``chunk`` tokens, one program each, so that a single row uses many
multiprocessors; the launches pass on a few numbers per chunk and row:

    scan     (chunk, row)  the maximum, its id, and whether a logit is broken; for rows with top-k or top-p
                           also the maxima of groups of tokens and an estimate of the mass
    bound    (row)         the row's maximum, and the token of greedy and broken rows. From the maxima, a
                           bound below the threshold of top-k or top-p
    collect  (chunk, row)  without top-k and top-p: noise, and the chunk's best token. Else the list of the
                           few tokens above the bound, and the exact mass, if top-p needs it
    finish   (row)         the best token of all chunks; or threshold, noise and best token of the list

The bound is an estimate that finish verifies: if the list overflowed, or contains less than top-k or top-p
keep, the same code searches the whole row instead. The estimate is good because the likeliest tokens rarely
share a group: the k-th largest of N maxima has about k + k**2 / 2N tokens above it, and the largest
maxima together have nearly the mass of the likeliest tokens. N is 2,400 for 151,936 tokens. It fails for
flat rows, where the share of top-p is spread over thousands of tokens, and for a top-k of thousands.

Memory read per row of 151,936 tokens: the logits twice, 2 * 0.6 MB, and some 10 KB of maxima and list,
the latter in 16 short passes each for top-k and top-p. Up to 80 rows the second pass is served by an L2 of
50 MB; 256 rows are 311 MB at most, 0.07 ms at 4.3 TB/s. Noise, some 60 instructions per token, is computed
for all tokens only without top-k and top-p. A row that is searched whole is read 16 times more for each of
the two, by one program: a millisecond or two by estimate, for one row as for a hundred.

Nothing depends on the batch: maxima, counts and integer masses are exact in any order, and among equal sums
the lower id is taken. With the same logits, the token is that of torch's operations, except where masses or
noise round differently: they take exp and log of libdevice, as torch does on CUDA, and have its bits there.
Compared with a CPU a weight may differ by an ulp or two, 2.4e-7 of itself, and top-p keeps one token more or
less if a sum of probabilities is that close to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.filters import mass_unit
from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.sampling.triton_filters import NO_ID, draw, filter_floor, keys_of, scale, unit_weights
from aioinfer.sampling.triton_noise import INTERPRETED, gumbel, logarithm, row_key

__all__ = ["SampleTuning", "sample_tokens"]

_BAD = tl.constexpr(BAD_LOGITS)


@dataclass(frozen=True, slots=True)
class SampleTuning:
    """Sizes of the launches, all powers of two. They change no token."""

    #: tokens per program
    chunk: int = 2048
    #: the most groups of tokens in a row; the bound is computed from their maxima
    groups: int = 4096
    #: capacity of a row's list of tokens
    listed: int = 4096
    #: entries that one program loads at a time from a list, and from a whole row
    list_tile: int = 1024
    row_tile: int = 4096
    num_warps: int = 8


@dataclass(frozen=True, slots=True)
class _Scratch:
    """Memory through which the launches pass on their results."""

    #: [S, chunks] float32 and int32: a chunk's maximum, later its largest sum, and the id of the token
    peaks: torch.Tensor
    firsts: torch.Tensor
    #: [S, chunks] float32: sum of exp relative to the chunk's maximum; int64: exact mass
    shares: torch.Tensor
    masses: torch.Tensor
    #: [S, chunks, groups] float32
    maxima: torch.Tensor
    #: [S] float32, float32, int32: maximum, bound, and length of the list of a row
    row_peaks: torch.Tensor
    bounds: torch.Tensor
    lengths: torch.Tensor
    #: [S, listed] float32 and int32: logits above the bound, and their token ids
    entries: torch.Tensor
    entry_ids: torch.Tensor

    @classmethod
    def make(
        cls, rows: int, chunks: int, groups: int, listed: int, draws: bool, device: torch.device
    ) -> _Scratch:
        """Uninitialised memory; without ``draws`` most of it is empty."""

        def empty(size: int, dtype: torch.dtype, needed: bool = draws) -> torch.Tensor:
            return torch.empty(rows * size if needed else 0, dtype=dtype, device=device)

        return cls(
            peaks=empty(chunks, torch.float32, True),
            firsts=empty(chunks, torch.int32, True),
            shares=empty(chunks, torch.float32),
            masses=empty(chunks, torch.int64),
            maxima=empty(chunks * groups, torch.float32),
            row_peaks=empty(1, torch.float32),
            bounds=empty(1, torch.float32),
            lengths=empty(1, torch.int32),
            entries=empty(listed, torch.float32),
            entry_ids=empty(listed, torch.int32),
        )


@triton.jit
def _searched(top_k: tl.tensor, top_p: tl.tensor, vocab: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(k of top-k, 0 if off or the whole vocabulary; whether there is a threshold to search for)."""
    count = tl.where(top_k < vocab, top_k, 0).to(tl.int32)
    return count, (count > 0) | (top_p < 1.0)


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p"])
def _scan_kernel(
    logits: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor,
    peaks: tl.tensor, firsts: tl.tensor, maxima: tl.tensor, shares: tl.tensor,
    vocab: tl.tensor, stride: tl.tensor,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, DRAWS: tl.constexpr,
) -> None:  # fmt: skip
    """Per chunk: the largest logit (+inf if any is NaN or +inf) and the lowest id that has it. With DRAWS,
    for rows with top-k or top-p: maxima of groups, and the sum of exp relative to the chunk's maximum."""
    row = tl.program_id(1).to(tl.int64)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
    finite = x < float("inf")
    x = tl.where(finite, x, float("-inf"))
    peak = tl.max(x, 0)
    first = tl.min(tl.where(x == peak, ids, NO_ID), 0)
    cell = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(peaks + cell, tl.where(tl.min(finite.to(tl.int32), 0) == 0, float("inf"), peak))
    tl.store(firsts + cell, first)
    if DRAWS:
        temp = tl.load(temperature + row)
        _, searched = _searched(tl.load(top_k + row), tl.load(top_p + row), vocab)
        if searched & (temp > 0.0):
            # Adjacent ids, which may be likely together, fall into different groups.
            grouped = tl.max(tl.reshape(x, [CHUNK // GROUPS, GROUPS]), 0)
            tl.store(maxima + cell * GROUPS + tl.arange(0, GROUPS), grouped)
            base = tl.where(peak > float("-inf"), peak, 0.0)
            tl.store(shares + cell, tl.sum(tl.exp(scale(x, base, temp)), 0))


@triton.jit
def _guess(
    maxima: tl.tensor, here: tl.tensor, peak: tl.tensor, temp: tl.tensor,
    count: tl.tensor, top_p: tl.tensor, mass: tl.tensor, vocab: tl.tensor,
    MAXIMA: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """A scaled logit that is probably not above any token that top-k, or without it top-p, keeps.

    It is the largest of the groups' maxima that together with all larger ones has the count of top-k, or the
    mass of top-p, rounded down to 7 bits of its fraction; -inf if there is none.
    """
    at = tl.arange(0, MAXIMA)
    scaled = scale(tl.load(maxima + at, mask=at < here, other=float("-inf")), peak, temp)
    key = keys_of(scaled)
    weight = tl.where(count > 0, 1.0, tl.exp(scaled))
    weight = tl.where(scaled > float("-inf"), weight, 0.0)
    target = tl.where(count > 0, count.to(tl.float32), top_p * mass)
    prefix = tl.full([], 0, tl.uint32)
    for step in range(16):
        one = tl.full([], 1, tl.uint32) << (tl.full([], 30, tl.uint32) - step).to(tl.uint32)
        below = tl.sum(tl.where(key <= prefix + (one - 1), weight, 0.0), 0)
        prefix = tl.where(below < target, prefix + one, prefix)
    bound = -tl.minimum(prefix + 0x7FFF, 0x7F800000).to(tl.uint32).to(tl.float32, bitcast=True)
    # Tokens below this logit together have at most the share of the mass that top-p removes.
    slight = tl.log(tl.maximum(1.0 - top_p, 1e-9) * mass / vocab)
    return tl.where(count > 0, bound, tl.maximum(bound, slight))


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p"])
def _bound_kernel(
    temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor,
    peaks: tl.tensor, firsts: tl.tensor, maxima: tl.tensor, shares: tl.tensor,
    row_peaks: tl.tensor, bounds: tl.tensor, lengths: tl.tensor, tokens: tl.tensor,
    vocab: tl.tensor, chunks: tl.tensor,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, MAXIMA: tl.constexpr, DRAWS: tl.constexpr,
) -> None:  # fmt: skip
    """Per row: its maximum, the token of a greedy or broken row, an empty list and its bound."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, CHUNKS)
    part = tl.load(peaks + row * chunks + at, mask=at < chunks, other=float("-inf"))
    first = tl.load(firsts + row * chunks + at, mask=at < chunks, other=NO_ID)
    peak = tl.max(part, 0)
    first = tl.min(tl.where(part == peak, first, NO_ID), 0)
    finite = tl.abs(peak) < float("inf")
    tl.store(tokens + row, tl.where(finite, first, _BAD).to(tl.int64))
    if DRAWS:
        tl.store(row_peaks + row, peak)
        tl.store(lengths + row, 0)
        temp = tl.load(temperature + row)
        p = tl.load(top_p + row)
        count, searched = _searched(tl.load(top_k + row), p, vocab)
        if finite & searched & (temp > 0.0):
            share = tl.load(shares + row * chunks + at, mask=at < chunks, other=0.0)
            mass = tl.sum(share * tl.exp(scale(part, peak, temp)), 0)
            start = maxima + row * chunks * GROUPS
            bound = _guess(start, chunks * GROUPS, peak, temp, count, p, mass, vocab, MAXIMA)
            tl.store(bounds + row, bound)


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p", "seeds", "positions"])
def _collect_kernel(
    logits: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor,
    seeds: tl.tensor, positions: tl.tensor, row_peaks: tl.tensor, bounds: tl.tensor,
    peaks: tl.tensor, firsts: tl.tensor, masses: tl.tensor,
    lengths: tl.tensor, entries: tl.tensor, entry_ids: tl.tensor,
    vocab: tl.tensor, stride: tl.tensor,
    CHUNK: tl.constexpr, LISTED: tl.constexpr, UNIT: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Per chunk: write its best token to ``peaks`` and ``firsts``; or its mass, and its tokens not below the
    bound to the row's list, in any order. ``lengths`` also counts tokens beyond the list's capacity."""
    row = tl.program_id(1).to(tl.int64)
    temp = tl.load(temperature + row)
    peak = tl.load(row_peaks + row)
    # The scan has replaced NaN by +inf.
    if (temp == 0.0) | (tl.abs(peak) == float("inf")):
        return
    cell = row * tl.num_programs(0) + tl.program_id(0)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf"))
    scaled = scale(x, peak, temp)
    p = tl.load(top_p + row)
    count, searched = _searched(tl.load(top_k + row), p, vocab)
    if searched:
        if count == 0:
            tl.store(masses + cell, tl.sum(unit_weights(scaled, UNIT, WIDEN), 0))
        wanted = (scaled >= tl.load(bounds + row)) & (scaled > float("-inf"))
        number = tl.sum(wanted.to(tl.int32), 0)
        if number > 0:
            place = tl.atomic_add(lengths + row, number) + tl.cumsum(wanted.to(tl.int32), 0) - 1
            wanted = wanted & (place < LISTED)
            tl.store(entries + row * LISTED + place, x, mask=wanted)
            tl.store(entry_ids + row * LISTED + place, ids, mask=wanted)
    else:
        low, high = row_key(tl.load(seeds + row), tl.load(positions + row))
        noisy = scaled + gumbel(low, high, ids, WIDEN)
        noisy = tl.where(scaled >= _least(tl.load(min_p + row), WIDEN), noisy, float("-inf"))
        best = tl.max(noisy, 0)
        tl.store(peaks + cell, best)
        tl.store(firsts + cell, tl.min(tl.where(noisy == best, ids, NO_ID), 0))


@triton.jit
def _least(min_p: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """The floor of min-p, a scaled logit; -inf for off."""
    return tl.where(min_p > 0.0, logarithm(tl.where(min_p > 0.0, min_p, 1.0), WIDEN), float("-inf"))


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p", "seeds", "positions"])
def _finish_kernel(
    logits: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor,
    seeds: tl.tensor, positions: tl.tensor, row_peaks: tl.tensor, bounds: tl.tensor,
    peaks: tl.tensor, firsts: tl.tensor, masses: tl.tensor,
    lengths: tl.tensor, entries: tl.tensor, entry_ids: tl.tensor, tokens: tl.tensor,
    vocab: tl.tensor, stride: tl.tensor, chunks: tl.tensor,
    CHUNKS: tl.constexpr, LISTED: tl.constexpr, LIST_TILE: tl.constexpr, ROW_TILE: tl.constexpr,
    UNIT: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Per row that is neither greedy nor broken: its token."""
    row = tl.program_id(0).to(tl.int64)
    temp = tl.load(temperature + row)
    peak = tl.load(row_peaks + row)
    if (temp == 0.0) | (tl.abs(peak) == float("inf")):
        return
    at = tl.arange(0, CHUNKS)
    p = tl.load(top_p + row)
    count, searched = _searched(tl.load(top_k + row), p, vocab)
    token = tl.full([], NO_ID, tl.int32)
    if searched:
        low, high = row_key(tl.load(seeds + row), tl.load(positions + row))
        total = tl.full([], 0, tl.int64)
        if count == 0:
            total = tl.sum(tl.load(masses + row * chunks + at, mask=at < chunks, other=0), 0)
        length = tl.load(lengths + row)
        values = entries + row * LISTED
        names = entry_ids + row * LISTED
        line = logits + row * stride
        least = _least(tl.load(min_p + row), WIDEN)
        floor = tl.full([], float("-inf"), tl.float32)
        fits = (length <= LISTED).to(tl.int32)
        if fits != 0:
            floor, enough = filter_floor(values, length, peak, temp, count, p, total, UNIT, LIST_TILE, WIDEN)
            # A list of the whole row always suffices.
            fits = tl.where(tl.load(bounds + row) == float("-inf"), 1, enough)
        if fits != 0:
            floor = tl.maximum(floor, least)
            token = draw(values, names, length, peak, temp, floor, low, high, True, LIST_TILE, WIDEN)
        else:
            floor, _ = filter_floor(line, vocab, peak, temp, count, p, total, UNIT, ROW_TILE, WIDEN)
            floor = tl.maximum(floor, least)
            token = draw(line, names, vocab, peak, temp, floor, low, high, False, ROW_TILE, WIDEN)
    else:
        part = tl.load(peaks + row * chunks + at, mask=at < chunks, other=float("-inf"))
        first = tl.load(firsts + row * chunks + at, mask=at < chunks, other=NO_ID)
        token = tl.min(tl.where(part == tl.max(part, 0), first, NO_ID), 0)
    tl.store(tokens + row, token.to(tl.int64))


def _columns(batch: SamplingBatch) -> tuple[torch.Tensor, ...]:
    """The sampling parameters that kernels read, [S] each."""
    return batch.temperature, batch.top_k, batch.top_p, batch.min_p, batch.seeds, batch.positions


def sample_tokens(
    logits: torch.Tensor, batch: SamplingBatch, tuning: SampleTuning | None = None
) -> torch.Tensor:
    """One token per row, as :meth:`aioinfer.sampling.sampler.Sampler.sample` defines it, without penalties
    and banned ids.

    Reads nothing back from the device, and no flag of the batch but ``all_greedy``: a filter with a neutral
    parameter is off for its row. Memory comes from torch's allocator, so a captured launch has its own.

    Args:
        logits: [S, V] float32; not written to.
        batch: the rows' sampling parameters.
        tuning: sizes of the launches.

    Returns:
        [S] int64: token ids, BAD_LOGITS for broken rows
    """
    tuning = tuning or SampleTuning()
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    chunks = -(-vocab // tuning.chunk)
    padded = triton.next_power_of_2(chunks)
    groups = max(1, min(tuning.chunk, tuning.groups // padded))
    draws = not batch.all_greedy
    scratch = _Scratch.make(rows, chunks, groups, tuning.listed, draws, logits.device)
    temp, top_k, top_p, min_p, seeds, positions = (column.contiguous() for column in _columns(batch))
    per_row = (temp, top_k, top_p)
    per_chunk = (scratch.peaks, scratch.firsts, scratch.maxima, scratch.shares)
    # Every operation is rounded separately, as in torch.
    shape: dict[str, Any] = {"num_warps": tuning.num_warps, "enable_fp_fusion": False}
    _scan_kernel[(chunks, rows)](
        logits, *per_row, *per_chunk, vocab, logits.stride(0),
        CHUNK=tuning.chunk, GROUPS=groups, DRAWS=draws, **shape,
    )  # fmt: skip
    _bound_kernel[(rows,)](
        *per_row, *per_chunk, scratch.row_peaks, scratch.bounds, scratch.lengths, tokens, vocab, chunks,
        CHUNKS=padded, GROUPS=groups, MAXIMA=padded * groups, DRAWS=draws, **shape,
    )  # fmt: skip
    if not draws:
        return tokens
    shape |= {"LISTED": tuning.listed, "UNIT": mass_unit(vocab), "WIDEN": INTERPRETED}
    known = (
        *(logits, *per_row, min_p, seeds, positions, scratch.row_peaks, scratch.bounds),
        *(scratch.peaks, scratch.firsts, scratch.masses, scratch.lengths, scratch.entries, scratch.entry_ids),
    )
    _collect_kernel[(chunks, rows)](*known, vocab, logits.stride(0), CHUNK=tuning.chunk, **shape)
    _finish_kernel[(rows,)](
        *known, tokens, vocab, logits.stride(0), chunks,
        CHUNKS=padded, LIST_TILE=tuning.list_tile, ROW_TILE=tuning.row_tile, **shape,
    )  # fmt: skip
    return tokens
