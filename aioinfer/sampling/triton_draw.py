"""The last two launches of :mod:`aioinfer.sampling.triton_sampler`: the draw, with top-k and top-p from a
list of the likeliest tokens. Lines for which the list is too short are searched by one program, or left to
:mod:`aioinfer.sampling.triton_wide`."""

from __future__ import annotations

import triton
import triton.language as tl

from aioinfer.sampling.triton_filters import (
    NO_ID,
    draw,
    filter_floor,
    min_p_floor,
    read_logits,
    scale,
    searched,
    unit_weights,
)
from aioinfer.sampling.triton_lines import lowering
from aioinfer.sampling.triton_noise import gumbel, row_key
from aioinfer.sampling.triton_wide import WIDE, clear_search

__all__ = ["collect_kernel", "finish_kernel"]


@triton.jit
def _best_of_chunk(
    scaled: tl.tensor, ids: tl.tensor, min_p: tl.tensor, low: tl.tensor, high: tl.tensor,
    peaks: tl.tensor, firsts: tl.tensor, masses: tl.tensor,
    WEIGHS: tl.constexpr, UNIT: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Write the chunk's best token of those that min-p keeps, and their mass."""
    kept = scaled >= min_p_floor(min_p, WIDEN)
    noisy = tl.where(kept, scaled + gumbel(low, high, ids, WIDEN), float("-inf"))
    best = tl.max(noisy, 0)
    tl.store(peaks, best)
    tl.store(firsts, tl.min(tl.where(noisy == best, ids, NO_ID), 0))
    if WEIGHS:
        tl.store(masses, tl.sum(tl.where(kept, unit_weights(scaled, UNIT, WIDEN), 0), 0))


@triton.jit(
    do_not_specialize=[
        *("temperature", "top_k", "top_p", "min_p", "seeds", "positions", "lowered", "by", "banned")
    ]
)
def collect_kernel(
    logits: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor,
    seeds: tl.tensor, positions: tl.tensor, lowered: tl.tensor, by: tl.tensor, banned: tl.tensor,
    row_peaks: tl.tensor, bounds: tl.tensor,
    peaks: tl.tensor, firsts: tl.tensor, masses: tl.tensor,
    lengths: tl.tensor, entries: tl.tensor, entry_ids: tl.tensor,
    vocab: tl.tensor, stride: tl.tensor,
    CHUNK: tl.constexpr, LISTED: tl.constexpr, FILTERS: tl.constexpr, WEIGHS: tl.constexpr,
    PER: tl.constexpr, ADJUSTED: tl.constexpr, UNIT: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Per chunk: write its best token to ``peaks`` and ``firsts``; or its mass, and its tokens not below the
    bound to the line's list, in any order. ``lengths`` also counts tokens beyond the list's capacity."""
    line = tl.program_id(1).to(tl.int64)
    row = line // PER
    temp = tl.load(temperature + row)
    peak = tl.load(row_peaks + line)
    # The scan has replaced NaN by +inf.
    if (temp == 0.0) | (tl.abs(peak) == float("inf")):
        return
    cell = line * tl.num_programs(0) + tl.program_id(0)
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    name, amount = lowering(lowered, by, line, PER)
    x = read_logits(logits + line * stride, ids, ids < vocab, name, amount, banned, ADJUSTED)
    scaled = scale(x, peak, temp)
    asked = tl.full([], 0, tl.int1)
    if FILTERS:
        count, asked = searched(tl.load(top_k + row), tl.load(top_p + row), vocab)
        if asked:
            if count == 0:
                tl.store(masses + cell, tl.sum(unit_weights(scaled, UNIT, WIDEN), 0))
            wanted = (scaled >= tl.load(bounds + line)) & (scaled > float("-inf"))
            number = tl.sum(wanted.to(tl.int32), 0)
            if number > 0:
                place = tl.atomic_add(lengths + line, number) + tl.cumsum(wanted.to(tl.int32), 0) - 1
                wanted = wanted & (place < LISTED)
                tl.store(entries + line * LISTED + place, x, mask=wanted)
                tl.store(entry_ids + line * LISTED + place, ids, mask=wanted)
    if asked == 0:
        low, high = row_key(tl.load(seeds + row), tl.load(positions + line))
        _best_of_chunk(
            scaled, ids, tl.load(min_p + row), low, high, peaks + cell, firsts + cell, masses + cell,
            WEIGHS, UNIT, WIDEN,
        )  # fmt: skip


@triton.jit
def _draw_listed(
    values: tl.tensor, names: tl.tensor, length: tl.tensor, bound: tl.tensor,
    peak: tl.tensor, temp: tl.tensor, count: tl.tensor, p: tl.tensor, total: tl.tensor, least: tl.tensor,
    low: tl.tensor, high: tl.tensor,
    LISTED: tl.constexpr, WEIGHS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(whether the list sufficed, the token, the mass of the tokens it was drawn from)"""
    token = tl.full([], NO_ID, tl.int32)
    mass = tl.full([], 0, tl.int64)
    fits = (length <= LISTED).to(tl.int32)
    if fits != 0:
        floor, enough = filter_floor(values, length, peak, temp, count, p, total, UNIT, TILE, WIDEN)
        # A list of the whole line always suffices.
        fits = tl.where(bound == float("-inf"), 1, enough)
        if fits != 0:
            none = tl.full([], -1, tl.int32)
            _, token, mass = draw(
                values, names, 0, length, peak, temp, tl.maximum(floor, least), low, high, none, temp, none,
                True, False, WEIGHS, UNIT, TILE, WIDEN,
            )  # fmt: skip
    return fits, token, mass


@triton.jit
def _draw_whole(
    values: tl.tensor, number: tl.tensor, peak: tl.tensor, temp: tl.tensor, count: tl.tensor, p: tl.tensor,
    total: tl.tensor, least: tl.tensor, low: tl.tensor, high: tl.tensor,
    WEIGHS: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(the token, the mass of the tokens it was drawn from) of a whole line, by one program"""
    floor, _ = filter_floor(values, number, peak, temp, count, p, total, UNIT, TILE, WIDEN)
    none = tl.full([], -1, tl.int32)
    _, token, mass = draw(
        values, values, 0, number, peak, temp, tl.maximum(floor, least), low, high, none, temp, none,
        False, False, WEIGHS, UNIT, TILE, WIDEN,
    )  # fmt: skip
    return token, mass


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "min_p", "seeds", "positions"])
def finish_kernel(
    logits: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor,
    seeds: tl.tensor, positions: tl.tensor, row_peaks: tl.tensor, bounds: tl.tensor,
    peaks: tl.tensor, firsts: tl.tensor, masses: tl.tensor,
    lengths: tl.tensor, entries: tl.tensor, entry_ids: tl.tensor, cells: tl.tensor,
    tokens: tl.tensor, kept: tl.tensor, vocab: tl.tensor, stride: tl.tensor, chunks: tl.tensor,
    CHUNKS: tl.constexpr, LISTED: tl.constexpr, LIST_TILE: tl.constexpr, ROW_TILE: tl.constexpr,
    FILTERS: tl.constexpr, NUCLEUS: tl.constexpr, TOP_K: tl.constexpr, WEIGHS: tl.constexpr,
    PER: tl.constexpr, UNIT: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Per line that is neither greedy nor broken: its token. With NUCLEUS lines without top-k, and with TOP_K
    those with it, for which the list does not suffice are marked as WIDE instead."""
    line = tl.program_id(0).to(tl.int64)
    row = line // PER
    temp = tl.load(temperature + row)
    peak = tl.load(row_peaks + line)
    if (temp == 0.0) | (tl.abs(peak) == float("inf")):
        return
    at = tl.arange(0, CHUNKS)
    cell = line * chunks + at
    token = tl.full([], NO_ID, tl.int32)
    mass = tl.full([], 0, tl.int64)
    asked = tl.full([], 0, tl.int1)
    if FILTERS:
        p = tl.load(top_p + row)
        count, asked = searched(tl.load(top_k + row), p, vocab)
        if asked:
            low, high = row_key(tl.load(seeds + row), tl.load(positions + line))
            total = tl.full([], 0, tl.int64)
            if count == 0:
                total = tl.sum(tl.load(masses + cell, mask=at < chunks, other=0), 0)
            least = min_p_floor(tl.load(min_p + row), WIDEN)
            fits, token, mass = _draw_listed(
                entries + line * LISTED, entry_ids + line * LISTED, tl.load(lengths + line),
                tl.load(bounds + line), peak, temp, count, p, total, least, low, high,
                LISTED, WEIGHS, UNIT, LIST_TILE, WIDEN,
            )  # fmt: skip
            if fits == 0:
                if ((count == 0) & NUCLEUS) | ((count > 0) & TOP_K):
                    tl.store(lengths + line, WIDE)
                    clear_search(cells, line)
                elif not (NUCLEUS and TOP_K):
                    token, mass = _draw_whole(
                        logits + line * stride, vocab, peak, temp, count, p, total, least, low, high,
                        WEIGHS, UNIT, ROW_TILE, WIDEN,
                    )  # fmt: skip
    if asked == 0:
        part = tl.load(peaks + cell, mask=at < chunks, other=float("-inf"))
        first = tl.load(firsts + cell, mask=at < chunks, other=NO_ID)
        token = tl.min(tl.where(part == tl.max(part, 0), first, NO_ID), 0)
        if WEIGHS:
            mass = tl.sum(tl.load(masses + cell, mask=at < chunks, other=0), 0)
    tl.store(tokens + line, token.to(tl.int64))
    if WEIGHS:
        tl.store(kept + line, mass)
