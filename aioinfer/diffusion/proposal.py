"""Proposal: a token for every position of a block, and its confidence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.diffusion.rows import Rows
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.filters import floors
from aioinfer.sampling.noise import gumbel

__all__ = ["Proposal", "propose"]

_NEVER = float("-inf")
#: lower temperatures are raised to this one, as in the sampler
_MIN_TEMPERATURE = 1e-37
#: The position that keys the noise is shifted by more than the length of any sequence per round, so that no
#: two (position, round) of a request have the same key. Round 0 has the key of an autoregressive token.
_ROUND_SHIFT = 32


@dataclass(slots=True)
class Proposal:
    """The proposed tokens of R blocks of B positions; tensors are [R, B] unless stated otherwise."""

    #: int64: the likeliest token, or the sampled one
    tokens: torch.Tensor
    #: float32: its probability in the distribution from which it was sampled
    confidence: torch.Tensor
    #: float32: its logprob at temperature 1 and without filters
    logprobs: torch.Tensor
    #: bool: the logits have no NaN or +inf and allow some token; elsewhere the other tensors are arbitrary
    valid: torch.Tensor
    #: [R, B, V] float32: logits relative to the largest of each position
    relative: torch.Tensor
    #: float32: the sum of the exponentials of ``relative``
    mass: torch.Tensor

    def entropy(self) -> torch.Tensor:
        """[R, B] float32: the entropy of the distribution at temperature 1 and without filters, in nats."""
        probabilities = self.relative.exp().div_(self.mass.unsqueeze(2))
        # Not torch.special.entr, which torch compiles at its first call on CUDA.
        return _total(torch.xlogy(probabilities, probabilities)).neg_()


def propose(
    logits: torch.Tensor,
    positions: torch.Tensor,
    rounds: torch.Tensor,
    sampling: Rows,
    *,
    drawn: bool,
    filtered: bool,
) -> Proposal:
    """Propose a token for every position, independent of other positions and of the batch.

    Greedy rows take the likeliest token, the lowest id among equals, and its probability at temperature 1.
    Other rows sample by Gumbel-max after temperature and filters, with noise keyed by seed, position and
    round; the confidence is the probability in that distribution, as in LLaDA2.1's own generation. The
    probability of the likeliest token needs no softmax: it is 1 / sum(exp(logits - max)).

    Args:
        logits: [R, B, V] float32; overwritten with the relative logits.
        positions: [R, B] int64.
        rounds: [R] int64.
        sampling: ``temperature``, ``top_p``, ``min_p`` (float32), ``top_k``, ``seed`` (int64), [R] each.
        drawn: whether any row has a temperature above 0.
        filtered: whether any row with a temperature also has a filter.
    """
    best, tokens = _likeliest(logits)
    valid = best.abs() < float("inf")
    relative = logits.sub_(best.unsqueeze(2))
    mass = _total(relative.exp())
    chosen, confidence = torch.zeros_like(mass), 1 / mass
    if drawn:
        greedy = (sampling["temperature"] == 0).unsqueeze(1)
        at, probability = _draw(
            relative, positions + (rounds << _ROUND_SHIFT).unsqueeze(1), sampling, filtered
        )
        tokens = torch.where(greedy, tokens, at)
        confidence = torch.where(greedy, confidence, probability)
        chosen = relative.gather(2, tokens.unsqueeze(2)).squeeze(2)
    return Proposal(tokens, confidence, chosen - mass.log(), valid, relative, mass)


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
        floor = floors(scaled, _as_sampling_rows(keys, seeds, sampling))
        scaled = scaled.masked_fill_(scaled < floor, _NEVER)
    token_ids = torch.arange(vocab_size, dtype=torch.int32, device=relative.device)
    tokens = gumbel(seeds, keys.reshape(-1), token_ids).add_(scaled).argmax(dim=1)
    mass = _total(scaled.exp())
    weights = scaled.gather(1, tokens.unsqueeze(1)).squeeze(1).exp()
    return tokens.view(rows, size), (weights / mass).view(rows, size)


def _as_sampling_rows(positions: torch.Tensor, seeds: torch.Tensor, sampling: Rows) -> SamplingBatch:
    """Every position as a row of a sampling batch, for the sampler's filters."""
    size = positions.shape[1]
    temperature, top_p, min_p, top_k = (
        sampling[name].repeat_interleave(size) for name in ("temperature", "top_p", "min_p", "top_k")
    )
    ones, zeros = torch.ones_like(top_p), torch.zeros_like(top_p)
    return SamplingBatch(
        slots=torch.zeros_like(seeds),
        positions=positions.reshape(-1),
        seeds=seeds,
        temperature=temperature,
        top_p=top_p,
        min_p=min_p,
        top_k=top_k,
        repetition_penalty=ones,
        presence_penalty=zeros,
        frequency_penalty=zeros,
        all_greedy=False,
        any_top_k=True,
        any_top_p=True,
        any_min_p=True,
        any_penalty=False,
    )


def _total(weights: torch.Tensor) -> torch.Tensor:
    """The sum over the vocabulary, in float64 and rounded to float32: the order of summation, which may
    depend on the number of rows, then does not change the result."""
    return weights.sum(dim=-1, dtype=torch.float64).to(torch.float32)
