"""Penalties: token counts that live on the device, by slot, so that they never wait for the host."""

from __future__ import annotations

import torch

from aioinfer.sampling.batch import PenaltyReset, SamplingBatch

__all__ = ["Penalties"]


class Penalties:
    """Counts of output tokens and presence of prompt tokens, for the slots whose requests need them.

    A step that is launched before the host has read the last token counts it all the same. Memory is one
    row of the vocabulary per slot with penalties, made when the first of them shows up; row 0 stays
    empty and serves all other slots.
    """

    __slots__ = ("_counts", "_device", "_in_prompt", "_row_of", "_used", "_vocab_size")

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        #: [slots] row of each slot; 0: none
        self._row_of = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._used: dict[int, int] = {}
        self._counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
        self._in_prompt = torch.zeros(1, vocab_size, dtype=torch.bool, device=device)

    def reset(self, resets: list[PenaltyReset]) -> None:
        """Requests with penalties took these slots: count what was said so far."""
        for reset in resets:
            row = self._row(reset.slot)
            self._counts[row] = 0
            self._in_prompt[row] = False
            prompt = torch.tensor(reset.prompt_ids, dtype=torch.int64, device=self._device)
            self._in_prompt[row, prompt] = True
            if reset.output_ids:
                output = torch.tensor(reset.output_ids, dtype=torch.int64, device=self._device)
                self._counts[row].index_add_(0, output, torch.ones_like(output, dtype=torch.int32))

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Penalised logits, float32 [S, V]: repetition (Keskar et al., CTRL, 2019) on prompt and output,
        then OpenAI's frequency and presence on the output. Neutral parameters change no bit."""
        rows = self._row_of[batch.slots]
        counts = self._counts[rows]
        seen = counts > 0
        repetition = batch.repetition_penalty.unsqueeze(1)
        penalised = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where((seen | self._in_prompt[rows]) & (repetition != 1), penalised, logits)
        logits = logits - batch.frequency_penalty.unsqueeze(1) * counts
        return logits - batch.presence_penalty.unsqueeze(1) * seen

    def record(self, batch: SamplingBatch, tokens: torch.Tensor) -> None:
        """Count the sampled tokens. Row 0 collects what belongs to slots without penalties, harmlessly:
        their parameters are neutral."""
        rows = self._row_of[batch.slots]
        self._counts.index_put_(
            (rows, tokens.clamp(min=0)), torch.ones_like(tokens, dtype=torch.int32), accumulate=True
        )

    def _row(self, slot: int) -> int:
        row = self._used.get(slot)
        if row is None:
            row = self._used[slot] = len(self._used) + 1
            self._row_of[slot] = row
            if row >= len(self._counts):
                self._grow(2 * row)
        return row

    def _grow(self, rows: int) -> None:
        for name in ("_counts", "_in_prompt"):
            old = getattr(self, name)
            new = torch.zeros(rows, self._vocab_size, dtype=old.dtype, device=self._device)
            new[: len(old)] = old
            setattr(self, name, new)
