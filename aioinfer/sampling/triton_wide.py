"""Lines whose filters keep more tokens than a list holds, in Triton: each is searched by several programs.

A nucleus of a flat line has tens of thousands of tokens. The threshold is the same as anywhere, the smallest
key whose cumulative weight reaches a target (:mod:`aioinfer.sampling.triton_filters`), but found four bits at
a time and by ``PARTS`` programs, each of which has a part of the line::

    narrow   (part, line)   8 launches: the digits so far follow from the sums of the launch before; the
                            weight up to each of 16 pivots is added to the sums of this one
    draw     (part, line)   noise, and the part's best token above the threshold
    settle   (line)         the best token of all parts

Where top-k has to be searched for as well as top-p, that is another 8 launches before. Programs of other
lines end at once. Sums are of integers: their order does not matter.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from aioinfer.sampling.filters import mass_unit
from aioinfer.sampling.triton_filters import (
    NO_ID,
    draw,
    floor_of,
    keys_of,
    mass_share,
    min_p_floor,
    read_logits,
    scale,
    searched,
    unit_weights,
)
from aioinfer.sampling.triton_lines import (
    SEARCH_CELLS,
    Chosen,
    Lines,
    SampleTuning,
    Scratch,
    Work,
    lowering,
)
from aioinfer.sampling.triton_noise import INTERPRETED, row_key

__all__ = ["WIDE", "clear_search", "draw_wide"]

#: in the place of a list's length: the line is for this module
WIDE = tl.constexpr(-1)
_PARTS = 16
_BITS = tl.constexpr(4)
_DIGITS = tl.constexpr(8)
_PIVOTS = tl.constexpr(16)
#: of one search: sums by launch and pivot
_SUMS = tl.constexpr(8 * 16)
_CELLS = tl.constexpr(SEARCH_CELLS)
_CLEARED = tl.constexpr(512)


@triton.jit
def clear_search(cells: tl.tensor, line: tl.tensor) -> None:
    """Make the sums of a line 0, before its first launch."""
    at = tl.arange(0, _CLEARED)
    tl.store(cells + line * _CELLS + at, tl.zeros([_CLEARED], tl.int64), mask=at < _CELLS)


@triton.jit
def _digits(sums: tl.tensor, prefixes: tl.tensor, number: tl.tensor, target: tl.tensor) -> tl.tensor:
    """The first ``number`` digits of the key, uint32, after as many launches. Each launch leaves
    the digits that it knew in ``prefixes``, and in ``sums`` the weight up to each value of the next."""
    prefix = tl.full([], 0, tl.uint32)
    if number > 0:
        upto = tl.load(sums + (number - 1) * _PIVOTS + tl.arange(0, _PIVOTS))
        digit = tl.sum((upto < target).to(tl.int32), 0).to(tl.uint32)
        shift = (tl.full([], 32, tl.int32) - number * _BITS).to(tl.uint32)
        prefix = tl.load(prefixes + number - 1).to(tl.uint32) + (digit << shift)
    return prefix


@triton.jit
def _count_key(cells: tl.tensor, number: tl.tensor, count: tl.tensor) -> tl.tensor:
    """The first digits of the key of top-k's threshold."""
    return _digits(cells, cells + 2 * _SUMS, number, count.to(tl.int64))


@triton.jit
def _mass_key(cells: tl.tensor, number: tl.tensor, top_p: tl.tensor) -> tl.tensor:
    """The first digits of the key of top-p's threshold. The weight up to the last pivot of the first launch
    is that of everything that top-k keeps."""
    total = tl.load(cells + _SUMS + _PIVOTS - 1)
    return _digits(cells + _SUMS, cells + 2 * _SUMS + _DIGITS, number, mass_share(top_p, total))


@triton.jit
def _part(vocab: tl.tensor, TILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where this program's part of a line begins and ends."""
    size = tl.cdiv(tl.cdiv(vocab, TILE), tl.num_programs(0)) * TILE
    begin = tl.program_id(0) * size
    return begin, tl.minimum(begin + size, vocab)


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "lowered", "by", "banned", "number"])
def _narrow_kernel(
    logits: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor,
    lowered: tl.tensor, by: tl.tensor, banned: tl.tensor,
    row_peaks: tl.tensor, lengths: tl.tensor, cells: tl.tensor,
    vocab: tl.tensor, stride: tl.tensor, number: tl.tensor,
    COUNT: tl.constexpr, PER: tl.constexpr, ADJUSTED: tl.constexpr,
    UNIT: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Per part: the weight of its tokens up to each value of the next digit, if ``number`` digits are known.
    With COUNT a token weighs 1 and top-k's threshold is searched for, else its mass and top-p's."""
    line = tl.program_id(1).to(tl.int64)
    row = line // PER
    p = tl.load(top_p + row)
    count, _ = searched(tl.load(top_k + row), p, vocab)
    asked = (count > 0) if COUNT else (p < 1.0)
    if (tl.load(lengths + line) != WIDE) | (asked == 0):
        return
    mine = cells + line * _CELLS
    limit = tl.full([], 0xFFFFFFFF, tl.uint32)
    if COUNT:
        prefix = _count_key(mine, number, count)
        sums = mine + number * _PIVOTS
        known = mine + 2 * _SUMS + number
    else:
        if count > 0:
            limit = _count_key(mine, _DIGITS, count)
        prefix = _mass_key(mine, number, p)
        sums = mine + _SUMS + number * _PIVOTS
        known = mine + 2 * _SUMS + _DIGITS + number
    if tl.program_id(0) == 0:
        tl.store(known, prefix.to(tl.int64))
    values = tl.arange(0, _PIVOTS)
    shift = (32 - (number + 1) * _BITS).to(tl.uint32)
    # The last of the first launch is 2**32 - 1.
    pivots = prefix + ((values + 1).to(tl.uint32) << shift) - 1
    temp = tl.load(temperature + row)
    peak = tl.load(row_peaks + line)
    name, amount = lowering(lowered, by, line, PER)
    begin, end = _part(vocab, TILE)
    upto = tl.zeros([TILE, _PIVOTS], tl.int64)
    for start in tl.range(begin, end, TILE):
        ids = start + tl.arange(0, TILE)
        inside = ids < end
        x = read_logits(logits + line * stride, ids, inside, name, amount, banned, ADJUSTED)
        scaled = scale(x, peak, temp)
        key = keys_of(scaled)
        weight = inside.to(tl.int64) if COUNT else unit_weights(scaled, UNIT, WIDEN)
        weight = tl.where(inside & (key <= limit), weight, 0)
        upto += tl.where(key[:, None] <= pivots[None, :], weight[:, None], 0)
    tl.atomic_add(sums + values, tl.sum(upto, 0), sem="relaxed")


@triton.jit(
    do_not_specialize=[
        *("temperature", "top_k", "top_p", "min_p", "seeds", "positions", "lowered", "by", "banned", "chunks")
    ]
)
def _draw_kernel(
    logits: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor,
    min_p: tl.tensor, seeds: tl.tensor, positions: tl.tensor,
    lowered: tl.tensor, by: tl.tensor, banned: tl.tensor,
    row_peaks: tl.tensor, lengths: tl.tensor, cells: tl.tensor,
    peaks: tl.tensor, firsts: tl.tensor, masses: tl.tensor,
    vocab: tl.tensor, stride: tl.tensor, chunks: tl.tensor,
    PER: tl.constexpr, ADJUSTED: tl.constexpr, WEIGHS: tl.constexpr,
    UNIT: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Per part: its best token above the thresholds."""
    line = tl.program_id(1).to(tl.int64)
    if tl.load(lengths + line) != WIDE:
        return
    row = line // PER
    p = tl.load(top_p + row)
    count, _ = searched(tl.load(top_k + row), p, vocab)
    mine = cells + line * _CELLS
    floor = min_p_floor(tl.load(min_p + row), WIDEN)
    if count > 0:
        floor = tl.maximum(floor, floor_of(_count_key(mine, _DIGITS, count)))
    if p < 1.0:
        floor = tl.maximum(floor, floor_of(_mass_key(mine, _DIGITS, p)))
    low, high = row_key(tl.load(seeds + row), tl.load(positions + line))
    name, amount = lowering(lowered, by, line, PER)
    begin, end = _part(vocab, TILE)
    best, token, mass = draw(
        logits + line * stride, lengths, begin, end, tl.load(row_peaks + line), tl.load(temperature + row),
        floor, low, high, name, amount, banned, False, ADJUSTED, WEIGHS, UNIT, TILE, WIDEN,
    )  # fmt: skip
    cell = line * chunks + tl.program_id(0)
    tl.store(peaks + cell, best)
    tl.store(firsts + cell, token)
    if WEIGHS:
        tl.store(masses + cell, mass)


@triton.jit(do_not_specialize=["parts", "chunks"])
def _settle_kernel(
    lengths: tl.tensor, peaks: tl.tensor, firsts: tl.tensor, masses: tl.tensor,
    tokens: tl.tensor, kept: tl.tensor, parts: tl.tensor, chunks: tl.tensor,
    PARTS: tl.constexpr, WEIGHS: tl.constexpr,
) -> None:  # fmt: skip
    """Per line: the best token of its parts."""
    line = tl.program_id(0).to(tl.int64)
    if tl.load(lengths + line) != WIDE:
        return
    at = tl.arange(0, PARTS)
    cell = line * chunks + at
    best = tl.load(peaks + cell, mask=at < parts, other=float("-inf"))
    token = tl.load(firsts + cell, mask=at < parts, other=NO_ID)
    tl.store(tokens + line, tl.min(tl.where(best == tl.max(best, 0), token, NO_ID), 0).to(tl.int64))
    if WEIGHS:
        tl.store(kept + line, tl.sum(tl.load(masses + cell, mask=at < parts, other=0), 0))


def draw_wide(lines: Lines, work: Work, scratch: Scratch, found: Chosen, tuning: SampleTuning) -> None:
    """Draw the tokens of the lines whose list has the length WIDE; the cells of these are cleared."""
    number, vocab = lines.logits.shape
    stride, chunks = lines.logits.stride(0), scratch.peaks.numel() // number
    parts = min(_PARTS, chunks)
    launch: dict[str, Any] = {"num_warps": tuning.num_warps, "enable_fp_fusion": False}
    kind = {
        "PER": lines.per, "ADJUSTED": lines.adjusted, "UNIT": mass_unit(vocab), "WIDEN": INTERPRETED,
        **launch,
    }  # fmt: skip
    where = found.peaks, scratch.lengths, scratch.cells
    parted = scratch.peaks, scratch.firsts, scratch.masses
    for count in [True] * work.wide_top_k + [False]:
        for known in range(_DIGITS.value):
            _narrow_kernel[(parts, number)](
                lines.logits, *lines.filters, *lines.changes, *where, vocab, stride, known,
                COUNT=count, TILE=tuning.wide_tile, **kind,
            )  # fmt: skip
    _draw_kernel[(parts, number)](
        lines.logits, *lines.filters, *lines.noise, *lines.changes, *where, *parted, vocab, stride, chunks,
        WEIGHS=found.kept is not None, TILE=tuning.chunk, **kind,
    )  # fmt: skip
    _settle_kernel[(number,)](
        scratch.lengths, *parted, found.tokens, found.kept, parts, chunks,
        PARTS=_PARTS, WEIGHS=found.kept is not None, **launch,
    )  # fmt: skip
