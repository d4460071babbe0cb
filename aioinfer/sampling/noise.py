"""Counter-based noise: a number for every (seed, position, token id), whatever the batch looks like.

No generator state exists, so a request's noise depends neither on its neighbours nor on the window, on
retraction or on padding, and any device can make the same bits. All arithmetic is on 32-bit words::

    mix(h)  = h ^= h >> 16;  h *= 0x85EBCA6B;  h ^= h >> 13;  h *= 0xC2B2AE35;  h ^= h >> 16
    key     = mix(mix(mix(lo(seed) + C) ^ hi(seed)) + position * C)
    other   = mix(key ^ 0x5BD1E995)
    bits    = mix(mix(key + token * C) ^ other)                   with C = 0x9E3779B1

``mix`` is the finalizer of MurmurHash3 (Appleby, 2011), a bijection that spreads every input bit.
"""

from __future__ import annotations

import torch

__all__ = ["gumbel", "random_bits", "uniform"]

_WORD = 0xFFFFFFFF
_C = 0x9E3779B1
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def random_bits(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """32 random bits for each row and token.

    Args:
        seeds: [S] int64, any value.
        positions: [S] int64, not negative.
        token_ids: [N] or [S, N] int64.

    Returns:
        [S, N] int64 in [0, 2**32).
    """
    low, high = seeds & _WORD, (seeds >> 32) & _WORD
    key = _mix(_mix(low + _C & _WORD) ^ high)
    key = _mix(key + positions * _C & _WORD).unsqueeze(1)
    other = _mix(key ^ 0x5BD1E995)
    return _mix(_mix(key + token_ids * _C & _WORD) ^ other)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Uniform float32 [S, N] in the open interval (0, 1), with 2**-32 resolution near 0."""
    bits = random_bits(seeds, positions, token_ids)
    return (bits.to(torch.float32) + 0.5).mul_(2.0**-32).clamp_(max=_LARGEST_BELOW_ONE)


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [S, N]; argmax(logits + noise) samples the softmax of the logits.

    Written with log1p, so that the fine resolution of the uniform number lies at the upper tail: the
    largest noise decides who wins.
    """
    noise = uniform(seeds, positions, token_ids)
    return noise.neg_().log1p_().neg_().log_().neg_()


def _mix(words: torch.Tensor) -> torch.Tensor:
    """See the module; int64 holding 32-bit words, whose products may wrap without harm to the low half."""
    words = words ^ (words >> 16)
    words = words * 0x85EBCA6B & _WORD
    words = words ^ (words >> 13)
    words = words * 0xC2B2AE35 & _WORD
    return words ^ (words >> 16)
