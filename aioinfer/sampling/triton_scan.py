"""The first two launches of :mod:`aioinfer.sampling.triton_sampler`: what is to be known of a line before a
token is drawn, and all that a greedy line needs."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from aioinfer.sampling.outcomes import BAD_LOGITS
from aioinfer.sampling.triton_filters import NO_ID, keys_of, read_logits, scale, searched
from aioinfer.sampling.triton_lines import is_wanted, lowering
from aioinfer.sampling.triton_noise import exponential

__all__ = ["bound_kernel", "scan_kernel"]

_BAD = tl.constexpr(BAD_LOGITS)


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "wanted", "lowered", "by", "banned"])
def scan_kernel(
    logits: tl.tensor, temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, wanted: tl.tensor,
    lowered: tl.tensor, by: tl.tensor, banned: tl.tensor,
    peaks: tl.tensor, firsts: tl.tensor, maxima: tl.tensor, shares: tl.tensor,
    weights: tl.tensor, moments: tl.tensor,
    vocab: tl.tensor, stride: tl.tensor,
    CHUNK: tl.constexpr, GROUPS: tl.constexpr, FILTERS: tl.constexpr, SUMS: tl.constexpr,
    ENTROPY: tl.constexpr, PER: tl.constexpr, ADJUSTED: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Per chunk: the largest logit (+inf if any is NaN or +inf) and the lowest id that has it. With FILTERS,
    for lines with top-k or top-p: maxima of groups, and the sum of exp relative to the chunk's maximum. With
    SUMS and ENTROPY the sums that these take, in float64, in an order that depends on CHUNK alone."""
    line = tl.program_id(1).to(tl.int64)
    if is_wanted(wanted, line) == 0:
        return
    ids = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    name, amount = lowering(lowered, by, line, PER)
    x = read_logits(logits + line * stride, ids, ids < vocab, name, amount, banned, ADJUSTED)
    finite = x < float("inf")
    x = tl.where(finite, x, float("-inf"))
    peak = tl.max(x, 0)
    first = tl.min(tl.where(x == peak, ids, NO_ID), 0)
    cell = line * tl.num_programs(0) + tl.program_id(0)
    tl.store(peaks + cell, tl.where(tl.min(finite.to(tl.int32), 0) == 0, float("inf"), peak))
    tl.store(firsts + cell, first)
    base = tl.where(peak > float("-inf"), peak, 0.0)
    if SUMS:
        relative = x - base
        weight = exponential(relative, WIDEN).to(tl.float64)
        tl.store(weights + cell, tl.sum(weight, 0))
        if ENTROPY:
            moment = weight * tl.where(weight > 0.0, relative, 0.0).to(tl.float64)
            tl.store(moments + cell, tl.sum(moment, 0))
    if FILTERS:
        temp = tl.load(temperature + line // PER)
        _, asked = searched(tl.load(top_k + line // PER), tl.load(top_p + line // PER), vocab)
        if asked & (temp > 0.0):
            # Adjacent ids, which may be likely together, fall into different groups.
            grouped = tl.max(tl.reshape(x, [CHUNK // GROUPS, GROUPS]), 0)
            tl.store(maxima + cell * GROUPS + tl.arange(0, GROUPS), grouped)
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


@triton.jit
def _total(
    weights: tl.tensor, moments: tl.tensor, part: tl.tensor, peak: tl.tensor, inside: tl.tensor,
    ENTROPY: tl.constexpr, WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The sum of exp relative to ``peak``, and the entropy, float32 each, from those of chunks, whose maxima
    are ``part``."""
    weight = tl.load(weights, mask=inside, other=0.0)
    distance = tl.where(weight > 0.0, part - peak, 0.0).to(tl.float64)
    factor = tl.exp(distance) if WIDEN else libdevice.exp(distance)
    total = tl.sum(weight * factor, 0)
    entropy = tl.full([], 0.0, tl.float64)
    if ENTROPY:
        moment = tl.load(moments, mask=inside, other=0.0)
        mean = tl.sum(factor * (moment + distance * weight), 0) / total
        entropy = tl.maximum((tl.log(total) if WIDEN else libdevice.log(total)) - mean, 0.0)
    return total.to(tl.float32), entropy.to(tl.float32)


@triton.jit(do_not_specialize=["temperature", "top_k", "top_p", "wanted"])
def bound_kernel(
    temperature: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, wanted: tl.tensor,
    peaks: tl.tensor, firsts: tl.tensor, maxima: tl.tensor, shares: tl.tensor,
    weights: tl.tensor, moments: tl.tensor,
    row_peaks: tl.tensor, bounds: tl.tensor, lengths: tl.tensor, tokens: tl.tensor,
    sums: tl.tensor, entropies: tl.tensor, vocab: tl.tensor, chunks: tl.tensor,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, MAXIMA: tl.constexpr, FILTERS: tl.constexpr,
    SUMS: tl.constexpr, ENTROPY: tl.constexpr, PER: tl.constexpr, WIDEN: tl.constexpr,
) -> None:  # fmt: skip
    """Per line: its maximum, the token of a greedy or broken line, an empty list and its bound, and sums."""
    line = tl.program_id(0).to(tl.int64)
    if FILTERS:
        tl.store(lengths + line, 0)
    if is_wanted(wanted, line) == 0:
        # As for a broken line: later launches skip it.
        tl.store(row_peaks + line, float("inf"))
        return
    at = tl.arange(0, CHUNKS)
    part = tl.load(peaks + line * chunks + at, mask=at < chunks, other=float("-inf"))
    first = tl.load(firsts + line * chunks + at, mask=at < chunks, other=NO_ID)
    peak = tl.max(part, 0)
    first = tl.min(tl.where(part == peak, first, NO_ID), 0)
    finite = tl.abs(peak) < float("inf")
    tl.store(tokens + line, tl.where(finite, first, _BAD).to(tl.int64))
    tl.store(row_peaks + line, peak)
    if SUMS:
        mine = line * chunks + at
        if finite:
            total, entropy = _total(weights + mine, moments + mine, part, peak, at < chunks, ENTROPY, WIDEN)
            tl.store(sums + line, total)
            if ENTROPY:
                tl.store(entropies + line, entropy)
    if FILTERS:
        temp = tl.load(temperature + line // PER)
        p = tl.load(top_p + line // PER)
        count, asked = searched(tl.load(top_k + line // PER), p, vocab)
        if finite & asked & (temp > 0.0):
            share = tl.load(shares + line * chunks + at, mask=at < chunks, other=0.0)
            mass = tl.sum(share * tl.exp(scale(part, peak, temp)), 0)
            start = maxima + line * chunks * GROUPS
            bound = _guess(start, chunks * GROUPS, peak, temp, count, p, mass, vocab, MAXIMA)
            tl.store(bounds + line, bound)
