"""Sampler: logits and parameters of a step's rows into one token per row."""

from __future__ import annotations

import torch

from aioinfer.sampling.batch import SamplingBatch
from aioinfer.sampling.noise import gumbel
from aioinfer.sampling.penalties import Penalties
from aioinfer.scheduling.step import BAD_LOGITS

__all__ = ["Sampler"]

_NEVER = float("-inf")
#: Likeliest tokens looked at before the whole vocabulary is sorted, on devices where looking is cheap.
_WINDOW = 512


class Sampler:
    """Order per row: penalties, banned ids, temperature, top-k, top-p, min-p, then Gumbel-max.

    top-p looks at the distribution that temperature and top-k left; min-p at the likeliest token.
    Tokens exactly as likely as the last one kept are kept as well, so that the outcome does not depend
    on how a sort orders equals. Every row gets the same token in any batch.
    """

    __slots__ = ("_penalties", "_token_ids")

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._penalties = Penalties(num_slots, vocab_size, device)
        self._token_ids = torch.arange(vocab_size, device=device)

    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Sample from float32 logits [S, V]; returns int64 [S], BAD_LOGITS for rows without a finite
        maximum (NaN or +inf somewhere, or nothing allowed)."""
        if batch.penalty_resets:
            self._penalties.reset(batch.penalty_resets)
        if batch.any_penalty:
            logits = self._penalties.apply(logits, batch)
        if batch.banned_rows is not None and batch.banned_ids is not None:
            logits = logits.clone()
            logits[batch.banned_rows, batch.banned_ids] = _NEVER
        best, tokens = logits.max(dim=-1)
        if not batch.all_greedy:
            greedy = batch.temperature == 0
            tokens = torch.where(greedy, tokens, self._draw(logits, best, batch, greedy))
        tokens = tokens.masked_fill(~best.isfinite(), BAD_LOGITS)
        if batch.any_penalty:
            self._penalties.record(batch, tokens)
        return tokens

    def _draw(
        self, logits: torch.Tensor, best: torch.Tensor, batch: SamplingBatch, greedy: torch.Tensor
    ) -> torch.Tensor:
        """Gumbel-max over what the filters leave. Greedy rows come out as anything."""
        temperature = batch.temperature.masked_fill(greedy, 1.0).unsqueeze(1)
        # Relative to the maximum: a tiny temperature then cannot overflow the likeliest token.
        scaled = (logits - best.unsqueeze(1)) / temperature
        if not (batch.any_top_k or batch.any_top_p or batch.any_min_p):
            noise = gumbel(batch.seeds, batch.positions, self._token_ids)
            return (scaled + noise).argmax(dim=-1)
        window = _window(scaled, batch)
        top, ids = scaled.topk(window, dim=-1)
        floor, covered = _floor(scaled, top, batch)
        if window < scaled.shape[1] and not bool(covered.all()):
            top, ids = scaled.sort(dim=-1, descending=True, stable=True)
            floor, covered = _floor(scaled, top, batch)
        noise = gumbel(batch.seeds, batch.positions, ids)
        winner = (top + noise).masked_fill(top < floor, _NEVER).argmax(dim=-1, keepdim=True)
        return ids.gather(1, winner).squeeze(1)


def _window(scaled: torch.Tensor, batch: SamplingBatch) -> int:
    """How many of the likeliest tokens to look at first. Asking whether they were enough costs a device
    other than the CPU a synchronisation, so there it is all of them."""
    vocab_size = scaled.shape[1]
    if scaled.device.type != "cpu":
        return vocab_size
    return min(vocab_size, max(_WINDOW, 1 + int(batch.top_k.clamp(max=vocab_size).max())))


def _floor(
    scaled: torch.Tensor, top: torch.Tensor, batch: SamplingBatch
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest scaled logit that survives the filters, [S, 1], and whether all survivors are in
    ``top`` (the likeliest tokens, descending), [S, 1].

    Scaled logits have their maximum at 0.
    """
    whole = top.shape[1] == scaled.shape[1]
    floor = torch.full_like(top[:, :1], _NEVER)
    if batch.any_top_k:
        k = batch.top_k.unsqueeze(1)
        kth = top.gather(1, (k - 1).clamp(0, top.shape[1] - 1))
        floor = torch.where(k > 0, kth, floor)
    if batch.any_top_p:
        # Mass within top-k, or of everything where top-k is off.
        mass = scaled.exp().masked_fill(scaled < floor, 0.0).sum(-1, keepdim=True)
        weights = top.exp().masked_fill(top < floor, 0.0)
        wanted = batch.top_p.unsqueeze(1) * mass
        before = weights.cumsum(-1) - weights
        last = (before < wanted).sum(-1, keepdim=True) - 1
        nucleus = top.gather(1, last.clamp(min=0))
        floor = torch.where(batch.top_p.unsqueeze(1) < 1, torch.maximum(floor, nucleus), floor)
    if batch.any_min_p:
        floor = torch.maximum(floor, batch.min_p.unsqueeze(1).log())
    covered = torch.ones_like(floor, dtype=torch.bool) if whole else top[:, -1:] < floor
    return floor, covered
