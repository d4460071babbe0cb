"""ScriptedLogits: a diffusion model without a network, whose blocks take as many rounds as one likes."""

from __future__ import annotations

import math

import torch

from aioinfer.diffusion.algorithm import ranks
from aioinfer.sampling.noise import random_bits, uniform

__all__ = ["ScriptedLogits"]

#: what the numbers of a block are drawn for
_STEPS, _ORDER, _TOKENS, _DRAFTS, _EDITS, _DOUBT = range(6)
_SURE, _LEAST_DOUBTFUL, _SPREAD = 0.9999, 0.15, 0.2


class ScriptedLogits:
    """Logits as a function of seed, request, block and round; the same bits on every device.

    A block of n unknown positions is filled in S rounds, S log-normal over blocks as steps are in practice.
    In each round a share of the positions becomes sure (0.9999) of its token and remains so; others would
    say the same, but doubtfully (0.15 to 0.35). A threshold between 0.35 and 0.9999 therefore takes exactly
    S rounds. The mask id is always the likeliest token of all: who proposes it is found out.

    With ``edits``, up to so many positions are sure of a draft at first, and one by one of another token
    after the block is full. An algorithm that edits then takes S + edits + 1 rounds, the last of which
    changes nothing; to others the drafts are final.
    """

    def __init__(
        self,
        vocab_size: int,
        mask_id: int,
        *,
        seed: int = 0,
        mean_steps: float = 8.0,
        variation: float = 0.6,
        edits: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        """``variation`` is the standard deviation of the steps over their mean; at 0 all blocks take
        ``mean_steps``. ``vocab_size`` is 16 or more."""
        if vocab_size < 16:
            raise ValueError(f"too few tokens to be in doubt of: {vocab_size}")
        self._vocab_size, self._mask_id, self._edits = vocab_size, mask_id, edits
        self._salt = (seed % (1 << 31)) << 32
        self._sigma = math.sqrt(math.log1p(variation**2))
        self._mu = math.log(mean_steps) - self._sigma**2 / 2
        self._device = torch.device(device)

    def steps(self, requests: torch.Tensor, blocks: torch.Tensor, editable: torch.Tensor) -> torch.Tensor:
        """Rounds that fill a block, [R] int64, at most one per position and 0 if there is none.

        Args:
            requests: [R] int64 in [0, 2**31), likewise ``blocks``.
            editable: [R, B] bool.
        """
        first, second = uniform(*self._keys(requests, blocks, _STEPS), self._ids(2)).unbind(1)
        # Box and Muller's normal number.
        normal = torch.sqrt(-2 * first.log()) * torch.cos(2 * math.pi * second)
        wanted = (self._mu + self._sigma * normal).exp().round().to(torch.int64).clamp(min=1)
        return torch.minimum(wanted, editable.sum(1))

    def edits(self, requests: torch.Tensor, blocks: torch.Tensor, editable: torch.Tensor) -> torch.Tensor:
        """Tokens that are edited in a block, [R] int64."""
        drawn = random_bits(*self._keys(requests, blocks, _EDITS), self._ids(1))[:, 0] % (self._edits + 1)
        return torch.minimum(drawn, editable.sum(1))

    def tokens(
        self, requests: torch.Tensor, blocks: torch.Tensor, editable: torch.Tensor, rounds: torch.Tensor
    ) -> torch.Tensor:
        """What every position would say in a round, [R, B] int64, never the mask id."""
        size, others = editable.shape[1], self._vocab_size - 1
        final = random_bits(*self._keys(requests, blocks, _TOKENS), self._ids(size)) % others
        shift = random_bits(*self._keys(requests, blocks, _DRAFTS), self._ids(size)) % (others - 1)
        order = self._order(requests, blocks, editable)
        edited = order < self.edits(requests, blocks, editable).unsqueeze(1)
        since = rounds - self.steps(requests, blocks, editable)
        draft = edited & (order > since.unsqueeze(1))
        index = torch.where(draft, (final + 1 + shift) % others, final)
        return index + (index >= self._mask_id)

    def logits(
        self, requests: torch.Tensor, blocks: torch.Tensor, editable: torch.Tensor, rounds: torch.Tensor
    ) -> torch.Tensor:
        """[R, B, V] float32 for the forwards number ``rounds``, [R] int64 from 0, of some blocks."""
        rows, size = editable.shape
        steps = self.steps(requests, blocks, editable).unsqueeze(1)
        order = self._order(requests, blocks, editable)
        turn = order * steps // editable.sum(1, keepdim=True).clamp(min=1)
        doubt = uniform(*self._keys(requests, blocks, _DOUBT), self._ids(size)) * _SPREAD + _LEAST_DOUBTFUL
        confidence = torch.where(turn <= rounds.unsqueeze(1), _SURE, doubt)
        tokens = self.tokens(requests, blocks, editable, rounds)
        logits = torch.zeros(rows, size, self._vocab_size, device=self._device)
        # So likely beside all others but the mask, at 0 each.
        logit = torch.logit(confidence) + math.log(self._vocab_size - 2)
        logits.scatter_(2, tokens.unsqueeze(2), logit.unsqueeze(2))
        logits[..., self._mask_id] = 30.0
        return logits

    def _order(self, requests: torch.Tensor, blocks: torch.Tensor, editable: torch.Tensor) -> torch.Tensor:
        """[R, B] int64: the place of each unknown position in a random order of them."""
        drawn = uniform(*self._keys(requests, blocks, _ORDER), self._ids(editable.shape[1]))
        return ranks(drawn, editable)

    def _keys(
        self, requests: torch.Tensor, blocks: torch.Tensor, use: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What the noise takes for seeds and positions."""
        return requests + self._salt, blocks + (use << 32)

    def _ids(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self._device)
