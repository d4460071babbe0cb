"""Renoise: take what is sure into a canvas of random tokens, and renew the rest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch

from aioinfer.diffusion.algorithm import Algorithm, precedes
from aioinfer.diffusion.block import Block, Rows
from aioinfer.diffusion.guide import Guide
from aioinfer.diffusion.proposal import Proposal, entropies, likeliest, noise_keys, total
from aioinfer.errors import InvalidRequest
from aioinfer.params import DiffusionParams, SamplingParams
from aioinfer.sampling.noise import gumbel, random_bits

__all__ = ["Renoise"]

#: ids that no vocabulary has: what a canvas begins with, and what it is renewed with after a round, is the
#: noise of these
_BEGINNING, _RENEWAL = 2**31 - 2, 2**31 - 1


class Renoise(Algorithm):
    """Draws a token for each position at a temperature that falls from ``t_max`` by equal steps, to ``t_min``
    behind the last of at most ``steps`` rounds. Those of lowest entropy are taken, as in
    :class:`~aioinfer.diffusion.algorithms.entropy_bound.EntropyBound`; all other positions get new random
    tokens, and the next round may draw any position again.

    The canvas ends when the likeliest tokens were the same for ``stability_threshold`` rounds before and the
    mean entropy is below ``confidence_threshold``, in nats. They are the result, not what was drawn, with
    their logprobs at temperature 1 in the last round. Entropies are of the tempered distribution, which the
    next round reads, too (self-conditioning).

    DiffusionGemma's sampler; names and defaults are transformers'. A request's temperature is a factor of
    both. With 0 the likeliest token is taken where one would be drawn, and without a seed the random tokens
    are those of seed 0. A position that holds a token of the output before (``Block.known``) keeps it.

    ``Block.ids`` are the likeliest tokens so far, the canvas is in ``state["canvas"]``, [R, B] int64, written
    to as well; ``Block.written_in`` is the round since which the token has been the likeliest.
    """

    name = "renoise"
    parameters: ClassVar = {
        "entropy_bound": 0.1,
        "t_min": 0.4,
        "t_max": 0.8,
        "steps": 48,
        "stability_threshold": 1,
        "confidence_threshold": 0.005,
    }
    counters = ("same",)
    monotone = False
    canvas = True
    steerable = False

    @classmethod
    def check(cls, params: DiffusionParams) -> None:
        super().check(params)
        low, high = (
            cls.parameters[name] if (value := getattr(params, name)) is None else value
            for name in ("t_min", "t_max")
        )
        if low > high:
            name = "t_max" if params.t_min is None else "t_min"
            raise InvalidRequest(name, f"temperatures would rise, from t_max {high:g} to t_min {low:g}")

    @classmethod
    def init_state(
        cls,
        params: Sequence[DiffusionParams],
        sampling: Sequence[SamplingParams],
        seeds: Sequence[int],
        size: int = 0,
    ) -> Rows:
        known = [
            0 if each.temperature == 0 and each.seed is None else seed
            for each, seed in zip(sampling, seeds, strict=True)
        ]
        return super().init_state(params, sampling, known, size)

    def begin(self, block: Block, canvas: torch.Tensor, state: Rows, vocab_size: int) -> torch.Tensor:
        """What the next forward reads of each row: final tokens, the canvas [R, B], or before the first round
        a new one."""
        fresh = (block.rounds == 0).unsqueeze(1)
        tokens = torch.where(fresh, self._noise(block, state, vocab_size, _BEGINNING), canvas)
        return torch.where(block.known | block.done.unsqueeze(1), block.ids, tokens)

    def temperatures(self, block: Block, state: Rows) -> torch.Tensor:
        """Those of the round that comes next, [R] float32."""
        left = (state["steps"] - block.rounds).clamp(min=1) / state["steps"]
        factor = torch.where(state["temperature"] > 0, state["temperature"], 1.0)
        return (state["t_min"] + (state["t_max"] - state["t_min"]) * left) * factor

    def step(
        self,
        logits: torch.Tensor,
        block: Block,
        state: Rows,
        *,
        drawn: bool = True,
        filtered: bool = True,
        guide: Guide | None = None,
    ) -> torch.Tensor:
        """See :meth:`Algorithm.step`. Row by row: no copy of all logits is made."""
        assert guide is None, "it is not steerable"
        shape, temperatures = block.ids.shape, self.temperatures(block, state)
        best, picked = torch.empty_like(block.ids), torch.empty_like(block.ids)
        logprobs = torch.empty(shape, dtype=torch.float32, device=logits.device)
        entropy, valid = (
            torch.empty_like(logprobs),
            torch.empty(shape, dtype=torch.bool, device=logits.device),
        )
        keys = noise_keys(block.positions, block.rounds)
        for row in range(shape[0]):
            at = slice(row, row + 1)
            raw = logits[at].to(torch.float32, copy=True)
            peak, best[at] = likeliest(raw)
            valid[at] = peak.abs() < float("inf")
            relative = raw.sub_(peak.unsqueeze(2))
            logprobs[at] = -total(relative.exp()).log()
            relative.div_(temperatures[row])
            entropy[at] = entropies(relative, total(relative.exp()))
            picked[at] = best[at]
            if drawn:
                token_ids = torch.arange(raw.shape[2], dtype=torch.int32, device=raw.device)
                seeds = state["seed"][at].expand(shape[1])
                sampled = (gumbel(seeds, keys[row], token_ids) + relative[0]).argmax(dim=1)
                picked[row] = torch.where(state["temperature"][row] > 0, sampled, best[row])
        return self._advance(block, state, logits.shape[2], best, picked, logprobs, entropy, valid)

    def _advance(
        self,
        block: Block,
        state: Rows,
        vocab_size: int,
        best: torch.Tensor,
        picked: torch.Tensor,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        valid: torch.Tensor,
    ) -> torch.Tensor:
        free, live = ~block.known, ~block.done
        broken = live & (free & ~valid).any(1)
        going = live & ~broken
        before = precedes(-entropy.masked_fill(~valid, 0.0), free)
        spent = torch.where(before, entropy.unsqueeze(1), 0.0).sum(2)
        taken = spent <= state["entropy_bound"].unsqueeze(1)
        renewed = self._noise(block, state, vocab_size, _RENEWAL)
        state["canvas"].copy_(torch.where(taken, picked, renewed))
        where = free & going.unsqueeze(1)
        alike = ((best == block.ids) | ~free).all(1) & (block.rounds > 0)
        state["same"].copy_(torch.where(alike, state["same"] + 1, 0))
        changed = where & ((best != block.ids) | (block.rounds == 0).unsqueeze(1))
        block.ids.copy_(torch.where(where, best, block.ids))
        block.logprobs.copy_(torch.where(where, logprobs, block.logprobs))
        block.written_in.copy_(torch.where(changed, block.rounds.unsqueeze(1), block.written_in))
        mean = torch.where(free, entropy, 0.0).sum(1) / free.sum(1).clamp(min=1)
        sure = (state["same"] >= state["stability_threshold"]) & (mean < state["confidence_threshold"])
        ended = going & (sure | (block.rounds + 1 >= state["steps"]))
        block.known |= ended.unsqueeze(1)
        # Its keys and values are not those of the last round, of which there will be none.
        block.changed.copy_(going)
        block.failed |= broken
        block.done |= broken | ended
        block.rounds += live
        return block.done

    def choose(self, proposal: Proposal, block: Block, state: Rows) -> torch.Tensor:
        raise NotImplementedError("a canvas takes no proposals")

    def _noise(self, block: Block, state: Rows, vocab_size: int, word: int) -> torch.Tensor:
        """Random tokens, [R, B] int64, of the seed, the position, the round and a ``word``."""
        keys = noise_keys(block.positions, block.rounds)
        seeds = state["seed"].unsqueeze(1).expand_as(keys)
        words = torch.tensor([word], dtype=torch.int64, device=keys.device)
        bits = random_bits(seeds.reshape(-1), keys.reshape(-1), words).view_as(keys)
        return (bits * vocab_size) >> 32
