"""Proposal: a token for every position of a block, and its confidence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from aioinfer.diffusion.block import Rows
from aioinfer.sampling.filters import floors
from aioinfer.sampling.noise import gumbel

__all__ = ["Asked", "Proposal", "Propose"]
__all__ += ["entropies", "likeliest", "lower_", "noise_keys", "noise_positions", "propose", "total", "weigh"]

_NEVER = float("-inf")
#: lower temperatures are raised to this one, as in the sampler
_MIN_TEMPERATURE = 1e-37
#: The position that keys the noise is shifted by more than the length of any sequence per round, so that no
#: two (position, round) of a request have the same key. Round 0 has the key of an autoregressive token.
_ROUND_SHIFT = 32
#: Sums in float64 convert this many addends at a time: a copy of all would be twice as large as the logits.
_CONVERTED = 1 << 22


@dataclass(frozen=True, slots=True)
class Asked:
    """The request for a proposal for R blocks of B positions."""

    #: [R, B] int64
    positions: torch.Tensor
    #: [R] int64
    rounds: torch.Tensor
    #: ``temperature``, ``top_p``, ``min_p`` (float32), ``top_k``, ``seed`` (int64), [R] each
    sampling: Rows
    #: [R, B] bool: elsewhere the proposal may be anything
    wanted: torch.Tensor
    #: a token that is not proposed
    mask_id: int
    #: [R, B] int64 and [R] float32: one token of each position, or -1, whose logit is lowered, and how much
    lowered: tuple[torch.Tensor, torch.Tensor] | None = None
    #: the entropy is wanted
    entropy: bool = False
    #: some row has a temperature above 0; some row that has one also has a filter
    drawn: bool = True
    filtered: bool = True


@dataclass(slots=True)
class Proposal:
    """The proposed tokens of R blocks of B positions, [R, B] each."""

    #: int64: the likeliest token, or the sampled one
    tokens: torch.Tensor
    #: float32: its probability in the distribution from which it was sampled
    confidence: torch.Tensor
    #: float32: its logprob at temperature 1 and without filters
    logprobs: torch.Tensor
    #: bool: the logits have no NaN or +inf and allow some token; elsewhere the other tensors are arbitrary
    valid: torch.Tensor
    #: float32: the sum of the exponentials of the logits relative to the largest of the position
    mass: torch.Tensor
    #: float32: the entropy of the distribution at temperature 1 and without filters, in nats; None: it was
    #: not asked for
    entropy: torch.Tensor | None


#: proposes tokens from logits [R, B, V] of any floating dtype, which are not written to
Propose: TypeAlias = Callable[[torch.Tensor, Asked], Proposal]


def noise_positions(asked: Asked) -> torch.Tensor:
    """[R, B] int64: the positions that key the noise."""
    return noise_keys(asked.positions, asked.rounds)


def noise_keys(positions: torch.Tensor, rounds: torch.Tensor) -> torch.Tensor:
    """[R, B] int64: the positions that key the noise of positions [R, B] in rounds [R]."""
    return positions + (rounds << _ROUND_SHIFT).unsqueeze(1)


def propose(logits: torch.Tensor, asked: Asked) -> Proposal:
    """Propose a token for every position, independent of other positions and of the batch.

    Greedy rows take the likeliest token, the lowest id among equals, and its probability at temperature 1.
    Other rows sample by Gumbel-max after temperature and filters, with noise keyed by seed, position and
    round; the confidence is the probability in that distribution, as in LLaDA2.1's own generation. The
    probability of the likeliest token needs no softmax: it is 1 / sum(exp(logits - max)).
    """
    sampling = asked.sampling
    own = logits.to(torch.float32, copy=True)
    if asked.lowered is not None:
        lower_(own, *asked.lowered)
    own[..., asked.mask_id] = _NEVER
    best, tokens = likeliest(own)
    valid = best.abs() < float("inf")
    relative = own.sub_(best.unsqueeze(2))
    mass = total(relative.exp())
    chosen, confidence = torch.zeros_like(mass), 1 / mass
    if asked.drawn:
        greedy = (sampling["temperature"] == 0).unsqueeze(1)
        at, probability = _draw(relative, noise_positions(asked), sampling, asked.filtered)
        tokens = torch.where(greedy, tokens, at)
        confidence = torch.where(greedy, confidence, probability)
        chosen = relative.gather(2, tokens.unsqueeze(2)).squeeze(2)
    entropy = entropies(relative, mass) if asked.entropy else None
    return Proposal(tokens, confidence, chosen - mass.log(), valid, mass, entropy)


def weigh(
    logits: torch.Tensor, asked: Asked, tokens: torch.Tensor, proposed: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """What some tokens are worth at each position of one block.

    Args:
        logits: [1, B, V].
        asked: of one row.
        tokens: [T] int64.
        proposed: [B] int64: by :func:`propose`.

    Returns:
        The logprobs of the tokens in the distribution from which is drawn, before filters, [B, T] float64.
        Of a row with a temperature, the noise that is added to draw, [B, T], and what both together are of
        the tokens that were proposed, [B].
    """
    own = logits.to(torch.float32, copy=True)
    if asked.lowered is not None:
        lower_(own, *asked.lowered)
    own[..., asked.mask_id] = _NEVER
    relative = (own - own.amax(2, keepdim=True))[0]
    temperature = asked.sampling["temperature"]
    drawn = asked.drawn and bool(temperature > 0)
    if drawn:
        relative /= temperature.clamp(min=_MIN_TEMPERATURE)
    logprobs = relative.double() - total(relative.exp()).double().log().unsqueeze(1)
    if not drawn:
        return logprobs[:, tokens], None, None
    keys = noise_positions(asked)[0]
    seeds = asked.sampling["seed"].expand(len(keys))
    mine = proposed.unsqueeze(1)
    free = logprobs.gather(1, mine) + gumbel(seeds, keys, mine.to(torch.int32))
    return logprobs[:, tokens], gumbel(seeds, keys, tokens.to(torch.int32)).double(), free[:, 0]


def lower_(logits: torch.Tensor, ids: torch.Tensor, by: torch.Tensor) -> None:
    """Lower one logit of each position, in place; see :class:`Asked`."""
    amounts = torch.where(ids >= 0, by.unsqueeze(1), 0.0).unsqueeze(2)
    logits.scatter_add_(2, ids.clamp(min=0).unsqueeze(2), amounts.neg_())


def entropies(relative: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Entropies [R, B] of distributions, from logits [R, B, V] relative to the largest and their mass."""
    probabilities = relative.exp().div_(mass.unsqueeze(2))
    # Not torch.special.entr, which torch compiles at its first call on CUDA.
    return total(torch.xlogy(probabilities, probabilities)).neg_()


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of [R, B, V] and its token, the lowest id among equals; an arbitrary one for NaN."""
    if logits.is_cuda:
        return logits.max(dim=2)
    # On a CPU, torch vectorizes arithmetic, but neither argmax nor comparisons to bool: the token is found as
    # the one farthest from the end. float32 is exact up to 2**24.
    best, vocab_size = logits.amax(2), logits.shape[2]
    to_end = torch.arange(vocab_size, 0, -1, dtype=torch.float32, device=logits.device)
    equal = torch.eq(logits, best.unsqueeze(2), out=torch.empty_like(logits))
    return best, vocab_size - equal.mul_(to_end).amax(2).clamp_(min=1).to(torch.int64)


def _draw(
    relative: torch.Tensor, keys: torch.Tensor, sampling: Rows, filtered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled tokens and their probabilities, [R, B] each; arbitrary for greedy rows."""
    rows, size, vocab_size = relative.shape
    temperature = sampling["temperature"].clamp(min=_MIN_TEMPERATURE).view(rows, 1, 1)
    scaled = (relative / temperature).view(rows * size, vocab_size)
    seeds = sampling["seed"].unsqueeze(1).expand(rows, size).reshape(-1)
    if filtered:
        filters = (sampling[name].repeat_interleave(size) for name in ("top_k", "top_p", "min_p"))
        floor = floors(scaled, *filters)
        scaled = scaled.masked_fill_(scaled < floor, _NEVER)
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=relative.device)
    tokens = gumbel(seeds, keys.reshape(-1), token_ids).add_(scaled).argmax(dim=1)
    mass = total(scaled.exp())
    weights = scaled.gather(1, tokens.unsqueeze(1)).squeeze(1).exp()
    return tokens.view(rows, size), (weights / mass).view(rows, size)


def total(weights: torch.Tensor) -> torch.Tensor:
    """The sum over the vocabulary, in float64 and rounded to float32: the order of summation, which may
    depend on the number of rows, then does not change the result."""
    rows = max(1, _CONVERTED // max(1, weights[:1].numel()))
    parts = [part.sum(dim=-1, dtype=torch.float64).to(torch.float32) for part in torch.split(weights, rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
