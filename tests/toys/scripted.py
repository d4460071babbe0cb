"""ScriptedLogits: a diffusion model without a network, with a chosen number of rounds per block."""

from __future__ import annotations

import math
from statistics import NormalDist

import torch

from aioinfer.diffusion.algorithm import ranks

__all__ = ["ScriptedLogits"]

_SURE = 0.9999
#: probabilities of the likeliest token at unsure positions
_DOUBTS = torch.linspace(0.15, 0.35, 64, dtype=torch.float64)
_MASK_LOGIT = 30.0
#: multipliers of the hash: 2**64 / golden ratio, and another that is odd
_GOLDEN, _ODD = 0x9E3779B97F4A7C15 - (1 << 64), 0x632BE59BD9B4E019
_QUANTILES = 4096


class ScriptedLogits:
    """Logits as a function of the input of a block-causal model: a hash of everything before the block, and
    the block's own ids, where the mask id marks an unresolved position. The bits are the same on every device
    and in every batch.

    A block of unresolved positions is filled in S rounds, where S is log-normal over blocks, as in practice:
    in each round some of the unresolved positions have a sure token (probability 0.9999), all others an
    unsure one (0.15 to 0.35). An algorithm with a threshold between these takes exactly S rounds. The tokens
    depend on every id of the block, so tests detect a round on wrong ids. The mask id always has the largest
    logit, so tests detect an algorithm that proposes it.

    With ``edits``, up to that many positions are first filled with a draft; once the block is full, each in
    turn has another token as the sure one. An algorithm that edits then takes S + edits + 1 rounds, the last
    of which changes nothing; for other algorithms the drafts are final.
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
        """
        Args:
            vocab_size: at least 16, else ValueError.
            mask_id: the token of unresolved positions.
            seed: selects the tokens.
            mean_steps: mean number of rounds of a block.
            variation: standard deviation of the number of rounds, relative to the mean; 0 for equal blocks.
            edits: the most tokens of a block that are revised.
            device: the device of the logits.
        """
        if vocab_size < 16:
            raise ValueError(f"vocab_size must be at least 16, got {vocab_size}")
        self._vocab_size, self._mask_id, self._edits = vocab_size, mask_id, edits
        self._device = torch.device(device)
        self._salt = torch.tensor(seed, dtype=torch.int64, device=device)
        sigma = math.sqrt(math.log1p(variation**2))
        median = math.log(mean_steps) - sigma**2 / 2
        normal = [NormalDist().inv_cdf((at + 0.5) / _QUANTILES) for at in range(_QUANTILES)]
        steps = [max(1, round(math.exp(median + sigma * each))) for each in normal]
        self._steps = torch.tensor(steps, dtype=torch.int64, device=device)
        # The logit of a token with such a probability, if all others but the mask have the logit 0.
        shares = torch.cat((_DOUBTS, torch.tensor([_SURE], dtype=torch.float64)))
        self._levels = (torch.logit(shares) + math.log(vocab_size - 2)).float().to(device)

    def digest(self, ids: torch.Tensor) -> torch.Tensor:
        """A hash of the ids of blocks, [N, B] to [N], int64."""
        weights = (2 * torch.arange(1, ids.shape[1] + 1, device=ids.device) - 1) * _GOLDEN
        return _hash((_hash(ids + 1) * weights).sum(1))

    def chain(self, before: torch.Tensor, digests: torch.Tensor) -> torch.Tensor:
        """The hash of everything before the next block, [N] int64, from that before a block, 0 for the first,
        and the block's digest."""
        return _hash((before ^ digests) * _GOLDEN + _ODD)

    def steps(self, before: torch.Tensor, unresolved: torch.Tensor, size: int) -> torch.Tensor:
        """The rounds, [R] int64, that fill blocks with ``unresolved`` positions; 0 for none.

        Args:
            before: [R] int64, see :meth:`chain`.
            unresolved: [R] int64, number of unresolved positions.
            size: positions of a block.
        """
        planned = self._planned(self._bits(before, size))
        return planned - _stage(size - unresolved, planned, size) + 1

    def logits(self, before: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The logits [R, B, V] float32 of blocks [R, B] int64 after ``before`` [R] int64, see
        :meth:`chain`."""
        tokens, level = self._likeliest(before, ids)
        logits = torch.zeros(*ids.shape, self._vocab_size, device=ids.device)
        logits.scatter_(2, tokens.unsqueeze(2), self._levels[level].unsqueeze(2))
        logits[..., self._mask_id] = _MASK_LOGIT
        return logits

    def sure(self, before: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest tokens [R, B] int64 of blocks, as of :meth:`logits`, and whether they are sure."""
        tokens, level = self._likeliest(before, ids)
        return tokens, level == len(_DOUBTS)

    def _likeliest(self, before: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest token of each position, and the index of its logit in ``_levels``."""
        size, unresolved = ids.shape[1], ids == self._mask_id
        own = self._bits(before, size)
        tokens, level = self._fill(own, self._bits(self.chain(before, self.digest(ids)), size), unresolved)
        tokens = torch.where(unresolved, tokens, ids)
        if self._edits:
            tokens = self._revise(own, ids, unresolved, tokens)
        return tokens, torch.where(unresolved, level, len(_DOUBTS))

    def _fill(
        self, own: torch.Tensor, bits: torch.Tensor, unresolved: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest token of unresolved positions, and the index of its logit in ``_levels``."""
        size = unresolved.shape[1]
        planned = self._planned(own)
        resolved = size - unresolved.sum(1)
        sure = _stage(resolved, planned, size) * size // planned - resolved
        order = ranks(own[:, :size], unresolved)
        doubt = bits[:, size : 2 * size] % len(_DOUBTS)
        return self._token(bits[:, :size]), torch.where(order < sure.unsqueeze(1), len(_DOUBTS), doubt)

    def _revise(
        self, own: torch.Tensor, ids: torch.Tensor, unresolved: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """``tokens`` with drafts at the positions that are revised, and in a full block with the final token
        in place of its first draft."""
        size = ids.shape[1]
        order = ranks(own[:, :size], torch.ones_like(unresolved))
        edited = order < self._edited(own, size).unsqueeze(1)
        bits = own[:, size : 2 * size]
        draft, final = self._token(bits), self._token(bits + 1)
        tokens = torch.where(unresolved & edited, draft, tokens)
        pending = edited & (ids == draft) & ~unresolved.any(1, keepdim=True)
        first = order == torch.where(pending, order, size).amin(1, keepdim=True)
        return torch.where(pending & first, final, tokens)

    def _planned(self, own: torch.Tensor) -> torch.Tensor:
        size = own.shape[1] // 2 - 1
        return self._steps[own[:, 2 * size] % _QUANTILES].clamp(max=size)

    def _edited(self, own: torch.Tensor, size: int) -> torch.Tensor:
        return (own[:, 2 * size + 1] % (self._edits + 1)).clamp(max=size)

    def _token(self, bits: torch.Tensor) -> torch.Tensor:
        """Any token but the mask id."""
        index = bits % (self._vocab_size - 1)
        return index + (index >= self._mask_id)

    def _bits(self, state: torch.Tensor, size: int) -> torch.Tensor:
        """Random numbers from 0, int64 [R, 2 * size + 2]: two for each position and two for the block."""
        index = torch.arange(2 * size + 2, device=state.device) * _ODD + self._salt
        return _hash(_hash(state.unsqueeze(1) ^ index)) & 0x7FFFFFFF


def _stage(resolved: torch.Tensor, planned: torch.Tensor, size: int) -> torch.Tensor:
    """The number of the current round, from 1, of a block with ``resolved`` positions: after round i of S,
    the share i / S of the block is resolved."""
    return ((resolved + 1) * planned + size - 1) // size


def _hash(state: torch.Tensor) -> torch.Tensor:
    """One step of a multiplicative hash; signed words wrap around."""
    state = (state ^ (state >> 32)) * _GOLDEN
    return state ^ (state >> 29)
