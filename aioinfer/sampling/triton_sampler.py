"""Sampling in Triton: one token per line, from its logits and the sampling parameters of its row.

There are four launches, whose grids and arguments follow from shapes alone, so that a CUDA graph can capture
them. A line is cut into chunks of ``chunk`` tokens, one program each, so that a single line uses many
multiprocessors; the launches pass on a few numbers per chunk and line:

    scan     (chunk, line)  the maximum, its id, and whether a logit is broken; for lines with top-k or top-p
                            also the maxima of groups of tokens and an estimate of the mass
    bound    (line)         the line's maximum, and the token of greedy and broken lines. From the maxima, a
                            bound below the threshold of top-k or top-p
    collect  (chunk, line)  without top-k and top-p: noise, and the chunk's best token. Else the list of the
                            few tokens above the bound, and the exact mass, if top-p needs it
    finish   (line)         the best token of all chunks; or threshold, noise and best token of the list

The bound is an estimate that finish verifies: if the list overflowed, or contains less than top-k or top-p
keep, the whole line is searched instead. The estimate is good because the likeliest tokens rarely share a
group: the k-th largest of N maxima has about k + k**2 / 2N tokens above it, and the largest maxima together
have nearly the mass of the likeliest tokens. N is 2,400 for 151,936 tokens. It fails for flat lines, where
the share of top-p is spread over thousands of tokens, and for a top-k of thousands. Where the host has said
that there may be such (:attr:`~aioinfer.sampling.batch.SamplingBatch.wide_nucleus`), many programs search
them, in ten launches more (:mod:`aioinfer.sampling.triton_wide`); otherwise the program of finish does it.

Memory read per line of 151,936 tokens: the logits twice, 2 * 0.6 MB, and some 10 KB of maxima and list,
the latter in 16 short passes each for top-k and top-p. Up to 80 lines the second pass is served by an L2 of
50 MB; 256 lines are 311 MB at most, 0.07 ms at 4.3 TB/s. Noise, some 60 instructions per token, is computed
for all tokens only without top-k and top-p. A line that finish searches is read 16 times more for each of
the two, by one program: a millisecond or two by estimate. 16 programs read it 8 times, for several lines at
once: less than a tenth of that by the same estimate.

Nothing depends on the batch: maxima, counts and integer masses are exact in any order, and among equal sums
the lower id is taken. With the same logits, the token is that of torch's operations, except where masses or
noise round differently: they take exp and log of libdevice, as torch does on CUDA, and have its bits there.
Compared with a CPU a weight may differ by an ulp or two, 2.4e-7 of itself, and top-p keeps one token more or
less if a sum of probabilities is that close to it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.filters import mass_unit
from aioinfer.sampling.triton_draw import collect_kernel, finish_kernel
from aioinfer.sampling.triton_lines import Chosen, Lines, SampleTuning, Scratch, Work
from aioinfer.sampling.triton_noise import INTERPRETED
from aioinfer.sampling.triton_scan import bound_kernel, scan_kernel
from aioinfer.sampling.triton_wide import draw_wide

__all__ = ["choose_tokens", "sample_tokens"]


def choose_tokens(lines: Lines, work: Work, tuning: SampleTuning | None = None) -> Chosen:
    """One token per line.

    Reads nothing back from the device. Memory comes from torch's allocator, so a captured launch has its own.
    Lines with changes need ``work`` to search all wide lines, if it has filters.
    """
    tuning = tuning or SampleTuning()
    number, vocab = lines.logits.shape
    device, stride = lines.logits.device, lines.logits.stride(0)
    filters, wide = work.draws and work.filters, work.wide_nucleus and work.wide_top_k
    assert wide or not (filters and lines.adjusted), "one program reads lines as they are"
    chunks = -(-vocab // tuning.chunk)
    padded = triton.next_power_of_2(chunks)
    groups = max(1, min(tuning.chunk, tuning.groups // padded))
    scratch = Scratch.make(number, chunks, groups, tuning.listed, work, device)
    found = _results(number, work, device)
    if number == 0:
        return found
    # Every operation is rounded separately, as in torch.
    launch: dict[str, Any] = {"num_warps": tuning.num_warps, "enable_fp_fusion": False}
    shape = {"FILTERS": filters, "PER": lines.per, "WIDEN": INTERPRETED, **launch}
    sums = {"SUMS": work.sums, "ENTROPY": work.entropy}
    scanned = (
        *(scratch.peaks, scratch.firsts, scratch.maxima, scratch.shares),
        *(scratch.weights, scratch.moments),
    )
    scan_kernel[(chunks, number)](
        lines.logits, *lines.filters, lines.wanted, *lines.changes, *scanned, vocab, stride,
        CHUNK=tuning.chunk, GROUPS=groups, ADJUSTED=lines.adjusted, **sums, **shape,
    )  # fmt: skip
    bound_kernel[(number,)](
        *lines.filters, lines.wanted, *scanned, found.peaks, scratch.bounds, scratch.lengths,
        found.tokens, found.sums, found.entropy, vocab, chunks,
        CHUNKS=padded, GROUPS=groups, MAXIMA=padded * groups, **sums, **shape,
    )  # fmt: skip
    if not work.draws:
        return found
    shape |= {"LISTED": tuning.listed, "WEIGHS": work.weighs, "UNIT": mass_unit(vocab)}
    known = (
        *(found.peaks, scratch.bounds, scratch.peaks, scratch.firsts, scratch.masses),
        *(scratch.lengths, scratch.entries, scratch.entry_ids),
    )
    collect_kernel[(chunks, number)](
        lines.logits, *lines.filters, *lines.noise, *lines.changes, *known, vocab, stride,
        CHUNK=tuning.chunk, ADJUSTED=lines.adjusted, **shape,
    )  # fmt: skip
    finish_kernel[(number,)](
        lines.logits, *lines.filters, *lines.noise, *known, scratch.cells,
        found.tokens, found.kept, vocab, stride, chunks,
        CHUNKS=padded, LIST_TILE=tuning.list_tile, ROW_TILE=tuning.row_tile,
        NUCLEUS=work.wide_nucleus, TOP_K=work.wide_top_k, **shape,
    )  # fmt: skip
    if filters and (work.wide_nucleus or work.wide_top_k):
        draw_wide(lines, work, scratch, found, tuning)
    return found


def _results(number: int, work: Work, device: torch.device) -> Chosen:
    def empty(dtype: torch.dtype, needed: bool = True) -> Any:
        return torch.empty(number, dtype=dtype, device=device) if needed else None

    return Chosen(
        tokens=empty(torch.int64),
        peaks=empty(torch.float32),
        kept=empty(torch.int64, work.draws and work.weighs),
        sums=empty(torch.float32, work.sums),
        entropy=empty(torch.float32, work.entropy),
    )


def sample_tokens(
    logits: torch.Tensor, batch: SamplingBatch, tuning: SampleTuning | None = None
) -> torch.Tensor:
    """One token per row, as :meth:`aioinfer.sampling.sampler.Sampler.sample` defines it, without penalties
    and banned ids.

    Reads no flag of the batch but ``all_greedy`` and those of wide rows: a filter with a neutral parameter is
    off for its row.

    Args:
        logits: [S, V] float32; not written to.
        batch: the rows' sampling parameters.
        tuning: sizes of the launches.

    Returns:
        [S] int64: token ids, BAD_LOGITS for broken rows
    """
    wide = batch.wide_nucleus or batch.wide_top_k
    work = Work(draws=not batch.all_greedy, wide_nucleus=wide, wide_top_k=batch.wide_top_k)
    return choose_tokens(Lines.of(logits, batch), work, tuning).tokens
