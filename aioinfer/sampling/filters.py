"""Filters: top-k, top-p and min-p as one number per row, the floor: the smallest scaled logit that is kept.

Scaled logits are relative to the row's maximum and divided by the temperature, so the likeliest token is
at 0 and all others are below. Tokens exactly as likely as the last one kept are kept too, so the result does
not depend on the order of equal tokens.

The vocabulary is never sorted. A threshold is the smallest *key* whose cumulative weight reaches a target
(weight 1 and target k for top-k; probability mass and its share p for top-p), found digit by digit with
one histogram per digit, as in a radix sort that only descends into the digit it needs: three passes, no
synchronisation, exact on every device. On a CPU, where reading a tensor needs no synchronisation, the few
hundred likeliest tokens of ``torch.topk`` nearly always contain the threshold; the search runs for the other
rows.

Masses are integers, in units so small that the likeliest token weighs 2**44 of them or more for 2**18
tokens. Their sums are exact, so a mass does not depend on the order of summation, and hence not on batch,
threads, device or method.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from aioinfer import plugins
from aioinfer.sampling.batch import FilterRows

__all__ = ["FurtherFilter", "apply_further", "floors", "mass_unit"]

_NEVER = float("-inf")
#: (shift, bits) of the digits of a 31-bit key
_DIGITS = ((20, 11), (10, 10), (0, 10))
#: number of the likeliest tokens that a CPU sorts first, for rows without top-k, and the most for any row:
#: for more, the search is faster
_WINDOW, _LARGEST_WINDOW = 512, 4096


class FurtherFilter(Protocol):
    """A filter that the kernels do not have: a class without arguments in a file of ``further_filters``."""

    def keep(self, logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Which tokens survive, bool [R, V]. The likeliest token of a row survives in any case.

        Args:
            logits: [R, V] float32 after penalties, biases and bans, before temperature; -inf is removed
                already. Not written to.
            values: [R, 1] float32, the parameter of each row; never the neutral one.
        """


def apply_further(logits: torch.Tensor, filters: Sequence[FilterRows]) -> torch.Tensor:
    """A copy of logits, float32 [S, V], with -inf for the tokens that further filters remove. Other rows
    keep their bits, so that a row is sampled alike whichever filters its neighbours use."""
    logits = logits.clone()
    for each in filters:
        own = logits[each.rows]
        further: FurtherFilter = plugins.load(plugins.FILTERS, each.name)()
        keep = further.keep(own, each.values.unsqueeze(1)) | (own == own.amax(dim=1, keepdim=True))
        logits[each.rows] = own.masked_fill_(~keep, _NEVER)
    return logits


def floors(
    scaled: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    *,
    any_top_k: bool = True,
    any_top_p: bool = True,
    any_min_p: bool = True,
) -> torch.Tensor:
    """The smallest scaled logit that each row keeps, float32 [S, 1]; -inf where nothing is filtered.

    top-p is a share of the mass left by temperature and top-k; min-p is relative to the likeliest token.

    Args:
        scaled: [S, V] float32, maximum 0. Rows with NaN give an arbitrary floor and no error.
        top_k, top_p, min_p: [S] int64, float32 and float32, as in
            :class:`~aioinfer.sampling.batch.SamplingBatch`.
        any_top_k, any_top_p, any_min_p: whether some row has the filter; False saves the work.
    """
    floor = scaled.new_full((len(scaled), 1), _NEVER)
    if any_top_k or any_top_p:
        # A top-k of the whole vocabulary is off.
        top_k, top_p = (top_k * (top_k < scaled.shape[1])).unsqueeze_(1), top_p.unsqueeze(1)
        if scaled.device.type == "cpu":
            floor = _floors_by_window(scaled, top_k, top_p)
        else:
            floor = _floors_by_search(scaled, top_k, top_p, any_top_k, any_top_p)
    if any_min_p:
        floor = torch.maximum(floor, min_p.unsqueeze(1).log())
    return floor


def _floors_by_window(scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Floors from the likeliest tokens; by search for rows whose threshold is not among them."""
    vocab_size = scaled.shape[1]
    ks = top_k.flatten().tolist()
    # One more than k, to detect a tie across the edge of the window.
    size = max(k + 1 if k else min(_WINDOW, max(64, vocab_size // 8)) for k in ks)
    size = min(size, _LARGEST_WINDOW, vocab_size)
    top = scaled.topk(size).values
    by_k = torch.where(top_k > 0, top.gather(1, (top_k - 1).clamp_(0, size - 1)), _NEVER)
    # A k-th value equal to the last of the window may occur beyond it; so may the k-th value of a larger k.
    whole = (top[:, -1:] < by_k) | (size == vocab_size)
    unit = mass_unit(vocab_size)
    cumulative = _weights(top, unit).mul_(top >= by_k).cumsum(1)
    mass = cumulative[:, -1:]
    if 0 in ks:
        mass = torch.where(top_k > 0, mass, _weights(scaled, unit).sum(1, keepdim=True))
    wanted = _share(top_p, mass)
    last = (cumulative < wanted).sum(1, keepdim=True)
    by_p = torch.where(top_p < 1, top.gather(1, last.clamp(max=size - 1)), _NEVER)
    known = torch.where(top_k > 0, whole, (top_p >= 1) | (last < size))
    floor = torch.maximum(by_k, by_p)
    if not bool(known.all()):
        others = (~known).flatten().nonzero().flatten()
        any_top_k, any_top_p = bool((top_k[others] > 0).any()), bool((top_p[others] < 1).any())
        floor[others] = _floors_by_search(scaled[others], top_k[others], top_p[others], any_top_k, any_top_p)
    return floor


def _floors_by_search(
    scaled: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, any_top_k: bool, any_top_p: bool
) -> torch.Tensor:
    """Floors by :func:`_smallest_key`, from [S, V], [S, 1] and [S, 1]: bitwise equal to those by window."""
    # Non-negative floats have the same order as their bits.
    keys = scaled.abs().view(torch.int32)
    floor = torch.full_like(top_p, _NEVER)
    if any_top_k:
        ones = torch.ones((), dtype=torch.int64, device=scaled.device).expand_as(scaled)
        key = _smallest_key(keys, ones, top_k)
        floor = torch.where(top_k > 0, key.view(torch.float32).neg(), floor)
    if any_top_p:
        weights = _weights(scaled, mass_unit(scaled.shape[1]))
        mass = (weights * (scaled >= floor)).sum(1, keepdim=True)
        key = _smallest_key(keys, weights, _share(top_p, mass))
        by_p = torch.where(top_p < 1, key.view(torch.float32).neg(), _NEVER)
        floor = torch.maximum(floor, by_p)
    return floor


def _smallest_key(keys: torch.Tensor, weights: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The smallest key such that the total weight of the keys up to it is at least ``target``.

    Args:
        keys: [S, V] int32 in [0, 2**31).
        weights: [S, V] int64, not negative.
        target: [S, 1] int64, up to the sum of the weights.

    Returns:
        [S, 1] int32.
    """
    rows = len(keys)
    row_starts = torch.arange(rows, device=keys.device).unsqueeze_(1)
    prefix = torch.zeros_like(target, dtype=torch.int32)
    for shift, bits in _DIGITS:
        bins = 1 << bits
        cells = ((keys >> shift) & (bins - 1)) + row_starts * bins
        first = shift + bits > 30
        inside = weights if first else weights * ((keys >> (shift + bits)) == prefix)
        histogram = torch.zeros(rows * bins, dtype=torch.int64, device=keys.device)
        histogram.scatter_add_(0, cells.view(-1), inside.reshape(-1))
        upto = histogram.view(rows, bins).cumsum(1)
        digit = (upto < target).sum(1, keepdim=True).clamp_(max=bins - 1)
        below = upto.gather(1, (digit - 1).clamp_(min=0))
        target = target - below * (digit > 0)
        prefix = (prefix << bits) | digit.to(torch.int32)
    return prefix


def _weights(scaled: torch.Tensor, unit: float) -> torch.Tensor:
    """exp of scaled logits in whole units, int64."""
    return scaled.exp().mul_(unit).to(torch.int64)


def _share(top_p: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The smallest integer mass that is at least the share top_p of ``mass``."""
    return (top_p.to(torch.float64) * mass).ceil_().to(torch.int64)


def mass_unit(vocab_size: int) -> float:
    """Weight of the likeliest token: the largest power of two with which sums over ``vocab_size`` tokens stay
    below 2**63."""
    return 2.0 ** (62 - (vocab_size - 1).bit_length())
