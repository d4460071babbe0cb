"""Floors of top-k, top-p and min-p, and the draw, in Triton: the work of one program on one row.

The results are those of :mod:`aioinfer.sampling.filters`. A threshold is the smallest 31-bit key whose
cumulative weight reaches a target; here it is found two bits at a time: a pass over the entries adds the
weights below each of three pivots. Weights are integers (int64): their sums do not depend on the order of
addition.

"Entries" are logits: a whole row, where entry i is token i, or a list of candidates with their ids, which
must contain all tokens above some bound.

A row of logits may be read with two changes (ADJUSTED): one token's logit is lowered, and one token cannot be
sampled. Lists hold logits that are changed already.
"""

from __future__ import annotations

import triton
import triton.language as tl

from aioinfer.sampling.triton_noise import exponential, gumbel, logarithm

__all__ = [
    *("NO_ID", "draw", "filter_floor", "floor_of", "keys_of", "mass_share", "min_p_floor"),
    *("read_logits", "scale", "searched", "unit_weights"),
]

#: an id above all token ids, for "no token"
NO_ID = tl.constexpr(0x7FFFFFFF)
_INFINITE_KEY = tl.constexpr(0x7F800000)
_LARGEST_KEY = tl.constexpr(0x7FFFFFFF)


@triton.jit
def read_logits(
    line: tl.tensor, ids: tl.tensor, inside: tl.tensor, lowered: tl.tensor, by: tl.tensor, banned: tl.tensor,
    ADJUSTED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Logits of a row, float32; -inf where not ``inside``. With ADJUSTED that of the token ``lowered`` is
    less ``by``, and that of ``banned`` is -inf; -1 is no token."""
    x = tl.load(line + ids, mask=inside, other=float("-inf")).to(tl.float32)
    if ADJUSTED:
        x = tl.where(ids == lowered, x - by, x)
        x = tl.where(ids == banned, float("-inf"), x)
    return x


@triton.jit
def searched(top_k: tl.tensor, top_p: tl.tensor, vocab: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """(k of top-k, 0 if off or the whole vocabulary; whether there is a threshold to search for)."""
    count = tl.where(top_k < vocab, top_k, 0).to(tl.int32)
    return count, (count > 0) | (top_p < 1.0)


@triton.jit
def min_p_floor(min_p: tl.tensor, WIDEN: tl.constexpr) -> tl.tensor:
    """The floor of min-p, a scaled logit; -inf for off."""
    return tl.where(min_p > 0.0, logarithm(tl.where(min_p > 0.0, min_p, 1.0), WIDEN), float("-inf"))


@triton.jit
def scale(x: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Logits relative to the row's maximum, divided by the temperature, rounded as in torch: at most 0."""
    # The minimum is that of the sampler's torch path.
    return tl.div_rn(x - peak, tl.maximum(temperature, 1e-37))


@triton.jit
def keys_of(scaled: tl.tensor) -> tl.tensor:
    """uint32 keys that rise as scaled logits fall; _INFINITE_KEY for -inf."""
    return tl.abs(scaled).to(tl.uint32, bitcast=True)


@triton.jit
def unit_weights(scaled: tl.tensor, UNIT: tl.constexpr, WIDEN: tl.constexpr) -> tl.tensor:
    """exp of scaled logits in integer units, int64."""
    return (exponential(scaled, WIDEN) * UNIT).to(tl.int64)


@triton.jit
def _smallest_key(
    entries: tl.tensor, number: tl.tensor, peak: tl.tensor, temperature: tl.tensor, target: tl.tensor,
    COUNT: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The smallest key such that the total weight of the keys up to it is at least ``target``; a value above
    all keys if the weight of all is less. An entry weighs 1 with COUNT, else its mass."""
    nothing = tl.full([], 0, tl.int64)
    prefix = tl.full([], 0, tl.uint32)
    for step in range(16):
        shift = (tl.full([], 30, tl.uint32) - 2 * step).to(tl.uint32)
        one = tl.full([], 1, tl.uint32) << shift
        first = prefix + (one - 1)
        upto_0, upto_1, upto_2 = nothing, nothing, nothing
        for start in tl.range(0, number, TILE):
            at = start + tl.arange(0, TILE)
            inside = at < number
            scaled = scale(tl.load(entries + at, mask=inside, other=float("-inf")), peak, temperature)
            key = keys_of(scaled)
            weight = inside.to(tl.int64) if COUNT else unit_weights(scaled, UNIT, WIDEN)
            upto_0 += tl.sum(tl.where(key <= first, weight, 0), 0)
            upto_1 += tl.sum(tl.where(key <= first + one, weight, 0), 0)
            upto_2 += tl.sum(tl.where(key <= first + 2 * one, weight, 0), 0)
        digit = (upto_0 < target).to(tl.uint32) + (upto_1 < target).to(tl.uint32)
        prefix += (digit + (upto_2 < target).to(tl.uint32)) << shift
    return prefix


@triton.jit
def _mass(
    entries: tl.tensor, number: tl.tensor, peak: tl.tensor, temperature: tl.tensor, floor: tl.tensor,
    UNIT: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The mass of the entries not below ``floor``, int64."""
    total = tl.full([], 0, tl.int64)
    for start in tl.range(0, number, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(entries + at, mask=at < number, other=float("-inf"))
        scaled = scale(x, peak, temperature)
        total += tl.sum(tl.where(scaled >= floor, unit_weights(scaled, UNIT, WIDEN), 0), 0)
    return total


@triton.jit
def floor_of(key: tl.tensor) -> tl.tensor:
    """The scaled logit with a key, or -inf for a key above that of -inf."""
    return -tl.minimum(key, _INFINITE_KEY).to(tl.float32, bitcast=True)


@triton.jit
def mass_share(top_p: tl.tensor, total: tl.tensor) -> tl.tensor:
    """The least mass, int64, that is at least the share ``top_p`` of ``total``."""
    return tl.ceil(top_p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)


@triton.jit
def filter_floor(
    entries: tl.tensor, number: tl.tensor, peak: tl.tensor, temperature: tl.tensor,
    count: tl.tensor, top_p: tl.tensor, total: tl.tensor,
    UNIT: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The smallest scaled logit that top-k and top-p keep, and whether the entries sufficed to find it.

    ``count`` is the k of top-k, 0 for off; ``total`` is the mass of the row, read only without top-k.
    """
    floor = tl.full([], float("-inf"), tl.float32)
    enough = tl.full([], 1, tl.int32)
    if count > 0:
        key = _smallest_key(entries, number, peak, temperature, count.to(tl.int64), True, UNIT, TILE, WIDEN)
        enough = (key <= _LARGEST_KEY).to(tl.int32)
        floor = floor_of(key)
        if top_p < 1.0:
            total = _mass(entries, number, peak, temperature, floor, UNIT, TILE, WIDEN)
    if top_p < 1.0:
        wanted = mass_share(top_p, total)
        key = _smallest_key(entries, number, peak, temperature, wanted, False, UNIT, TILE, WIDEN)
        enough = tl.where(key <= _LARGEST_KEY, enough, 0)
        floor = tl.maximum(floor, floor_of(key))
    return floor, enough


@triton.jit
def draw(
    entries: tl.tensor, ids: tl.tensor, begin: tl.tensor, end: tl.tensor,
    peak: tl.tensor, temperature: tl.tensor, floor: tl.tensor, low: tl.tensor, high: tl.tensor,
    lowered: tl.tensor, by: tl.tensor, banned: tl.tensor,
    LISTED: tl.constexpr, ADJUSTED: tl.constexpr, WEIGHS: tl.constexpr,
    UNIT: tl.constexpr, TILE: tl.constexpr, WIDEN: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Gumbel-max over the entries from ``begin`` to ``end`` that are not below ``floor``.

    With LISTED the ids of the entries are in ``ids``, else they are their indices.

    Returns:
        the largest sum, the lowest id that has it, and, with WEIGHS, the mass of these entries, int64
    """
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.full([], NO_ID, tl.int32)
    mass = tl.full([], 0, tl.int64)
    for start in tl.range(begin, end, TILE):
        at = start + tl.arange(0, TILE)
        inside = at < end
        scaled = scale(read_logits(entries, at, inside, lowered, by, banned, ADJUSTED), peak, temperature)
        kept = inside & (scaled >= floor)
        name = tl.load(ids + at, mask=inside, other=NO_ID) if LISTED else at
        noisy = tl.where(kept, scaled + gumbel(low, high, name, WIDEN), float("-inf"))
        top = tl.max(noisy, 0)
        first = tl.min(tl.where(noisy == top, name, NO_ID), 0)
        token = tl.where((top > best) | ((top == best) & (first < token)), first, token)
        best = tl.maximum(best, top)
        if WEIGHS:
            mass += tl.sum(tl.where(kept, unit_weights(scaled, UNIT, WIDEN), 0), 0)
    return best, token, mass
