"""Proposal: a token for every position of a block, and how sure the model is of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aioinfer.diffusion.rows import Rows
from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.filters import floors
from aioinfer.sampling.noise import gumbel

__all__ = ["Proposal", "propose"]

_NEVER = float("-inf")
#: Colder rows are taken for this cold, as by the sampler.
_COLDEST = 1e-37
#: Rounds move the position that keys the noise by more than any sequence is long, so that no two
#: (position, round) of a request have the same key, and round 0 has that of an autoregressive token.
_ROUND_SHIFT = 32


@dataclass(slots=True)
class Proposal:
    """[R, B] each, and what it came from."""

    #: int64: the likeliest token, or the one drawn
    tokens: torch.Tensor
    #: float32: its probability in the distribution it was taken from
    confidence: torch.Tensor
    #: float32: the log of its probability at temperature 1 and without filters
    logprobs: torch.Tensor
    #: bool: the logits are numbers and allow some token; elsewhere the other tensors mean nothing
    sound: torch.Tensor
    #: [R, B, V] float32: logits relative to the largest
    relative: torch.Tensor
    #: float32: the sum of their exponentials
    mass: torch.Tensor

    def entropy(self) -> torch.Tensor:
        """[R, B] float32: of the distribution at temperature 1 and without filters, in nats."""
        probabilities = self.relative.exp().div_(self.mass.unsqueeze(2))
        # Not torch.special.entr, which CUDA has compiled when it is first called.
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
    """Choose for every position by itself: by seed, position and round, whatever else is in the batch.

    Greedy rows take the likeliest token, the lowest id of equals, and its probability as it is. Others draw
    by Gumbel-max from what temperature and filters leave, and that is the distribution in which the
    confidence is read, as LLaDA2.1's own generation does. The probability of the likeliest token needs no
    softmax: it is 1 / sum(exp(logits - max)).

    Args:
        logits: [R, B, V] float32; the relative logits are written over them.
        positions: [R, B] int64.
        rounds: [R] int64.
        sampling: ``temperature``, ``top_p``, ``min_p`` (float32), ``top_k``, ``seed`` (int64), [R] each.
        drawn: some row has a temperature.
        filtered: some row that has one has a filter, too.
    """
    best, tokens = _likeliest(logits)
    sound = best.abs() < float("inf")
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
    return Proposal(tokens, confidence, chosen - mass.log(), sound, relative, mass)


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest of [R, B, V] and its token, the lowest of equals; any token where there is NaN."""
    if logits.is_cuda:
        return logits.max(dim=2)
    # On a CPU, torch looks for indices one by one, and compares to truth values one by one, but works on
    # numbers in vectors: the token is the one that is farthest from the end. float32 counts up to 2**24.
    best, vocab_size = logits.amax(2), logits.shape[2]
    to_end = torch.arange(vocab_size, 0, -1, dtype=torch.float32, device=logits.device)
    equal = torch.eq(logits, best.unsqueeze(2), out=torch.empty_like(logits))
    return best, vocab_size - equal.mul_(to_end).amax(2).clamp_(min=1).to(torch.int64)


def _draw(
    relative: torch.Tensor, keys: torch.Tensor, sampling: Rows, filtered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their probabilities, [R, B] each; greedy rows come out as anything."""
    rows, size, vocab_size = relative.shape
    temperature = sampling["temperature"].clamp(min=_COLDEST).view(rows, 1, 1)
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
    """Every position as a row of its own, in the terms of the sampler's filters."""
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
    """The sum over the vocabulary. In float64 the order of summation, which a device may choose by the number
    of rows, does not show in the float32 that comes out."""
    return weights.sum(dim=-1, dtype=torch.float64).to(torch.float32)
