"""Counter-based noise: a number for every (seed, position, token id).

There is no generator state, so a request's noise depends neither on the batch, its slot or order nor on the
number of steps in flight, retraction or padding, and every device computes the same bits. The function, with
``>>>`` shifting in zeros and all arithmetic modulo the width of the words::

    64 bit:  mix(h) = h ^= h >>> 33;  h *= 0xFF51AFD7ED558CCD
                      h ^= h >>> 33;  h *= 0xC4CEB9FE1A85EC53
                      h ^= h >>> 33
             key    = mix(mix(seed + G) + position * G)             G = 0x9E3779B97F4A7C15
             a, b   = low and high word of key

    32 bit:  x = a + token
             x ^= x >>> 17;  x *= 0xED5AD4BB;  x += b
             x ^= x >>> 11;  x *= 0xAC4C1B51
             x ^= x >>> 15;  x *= 0x31848BAB
             x ^= x >>> 14

``mix`` is the finalizer of MurmurHash3 (Appleby, 2011). It is a bijection, and so is the key: at one
position no two seeds, and for one seed no two positions, have the same key. The per-token rounds are the
``triple32`` of hash-prospector (Wellons, 2018) with the high word added after the first; they too are a
bijection for each key. Only these rounds run once per token, on 32-bit words, which vector units process
fastest.
"""

from __future__ import annotations

import torch

__all__ = ["gumbel", "gumbel_of_keys", "random_bits", "row_keys", "uniform"]


def _signed(word: int, bits: int) -> int:
    """A word as a two's complement integer: torch multiplies signed integers, with the same bits."""
    return word - (1 << bits) if word >> (bits - 1) else word


def _word(word: int) -> torch.Tensor:
    """A 32-bit constant, [] int32: a Python number is converted to the tensor's type at every use."""
    return torch.tensor(_signed(word, 32), dtype=torch.int32, device="cpu")


_G = _signed(0x9E3779B97F4A7C15, 64)
_MIX_1 = _signed(0xFF51AFD7ED558CCD, 64)
_MIX_2 = _signed(0xC4CEB9FE1A85EC53, 64)
_TOKEN_1 = _word(0xED5AD4BB)
_TOKEN_2 = _word(0xAC4C1B51)
_TOKEN_3 = _word(0x31848BAB)
#: by n, the operands of x ^= x >>> n: a signed shift by n, and the mask that clears the copies of the sign
_SHIFTS = {n: (_word(n), _word((1 << (32 - n)) - 1)) for n in (17, 11, 15, 14)}
_LOW_31 = _word(0x7FFFFFFF)
#: uniform numbers are (n + 1/2) / 2**31 for the low 31 bits n, rounded to float32 but never to 1
_STEP = 2.0**-31
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def random_bits(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """32 random bits for each row and token.

    Args:
        seeds: [S] int64, any value.
        positions: [S] int64.
        token_ids: [N] or [S, N] int64 in [0, 2**31).

    Returns:
        [S, N] int64 in [0, 2**32).
    """
    bits, _ = _hash(row_keys(seeds, positions), token_ids.to(torch.int32))
    return bits.to(torch.int64) & 0xFFFFFFFF


def uniform(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Uniform float32 [S, N] in the open interval (0, 1), with 2**-31 resolution near 0."""
    return _minus_uniform(row_keys(seeds, positions), token_ids.to(torch.int32)).neg_()


def gumbel(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float32 [S, N]: argmax(logits + noise) samples the softmax of the logits.

    It is ``-log(-log(1 - u))``. 1 - u is as uniform as u, but ``-log1p(-u)`` keeps the fine resolution of
    u near 0 for the upper tail of the noise, which decides the maximum: the noise reaches 22.2, where
    ``-log(-log(u))`` in float32 would end at 16.6.
    """
    return gumbel_of_keys(row_keys(seeds, positions), token_ids.to(torch.int32))


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The two key words of each row, from int64 [S] each: int32 [2, S, 1]."""
    key = _mix(_mix(seeds + _G).add_(positions * _G))
    # Narrowing keeps the low word.
    return torch.stack((key, key >> 32)).to(torch.int32).unsqueeze_(2)


def gumbel_of_keys(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """:func:`gumbel` for keys int32 [2, S, 1] and ids int32 [N] or [S, N]."""
    noise = _minus_uniform(keys, token_ids)
    return noise.log1p_().neg_().log_().neg_()


def _minus_uniform(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    bits, scratch = _hash(keys, token_ids)
    numbers = scratch.view(torch.float32).copy_(bits.bitwise_and_(_LOW_31))
    return numbers.add_(0.5).mul_(-_STEP).clamp_(min=-_LARGEST_BELOW_ONE)


def _mix(h: torch.Tensor) -> torch.Tensor:
    """``mix`` of the module on int64, in place."""
    h.bitwise_xor_((h >> 33).bitwise_and_(0x7FFFFFFF)).mul_(_MIX_1)
    h.bitwise_xor_((h >> 33).bitwise_and_(0x7FFFFFFF)).mul_(_MIX_2)
    return h.bitwise_xor_((h >> 33).bitwise_and_(0x7FFFFFFF))


def _hash(keys: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The per-token rounds, int32 [S, N], and a scratch tensor of the same shape for the caller: on a CPU,
    new memory for each operation would cost more than the arithmetic."""
    x = keys[0] + token_ids
    scratch = torch.empty_like(x)
    _xor_shifted(x, 17, scratch).mul_(_TOKEN_1).add_(keys[1])
    _xor_shifted(x, 11, scratch).mul_(_TOKEN_2)
    _xor_shifted(x, 15, scratch).mul_(_TOKEN_3)
    _xor_shifted(x, 14, scratch)
    return x, scratch


def _xor_shifted(x: torch.Tensor, shift: int, scratch: torch.Tensor) -> torch.Tensor:
    """x ^= x >>> shift."""
    amount, mask = _SHIFTS[shift]
    torch.bitwise_right_shift(x, amount, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_(mask))
