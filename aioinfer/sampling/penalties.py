"""Penalties: token counts by slot, kept on the device so that penalties never wait for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from aioinfer.sampling.batch import PenaltyReset, SamplingBatch

__all__ = ["IN_PROMPT", "Penalise", "Penalties", "penalise_counted", "penalised"]

#: A kernel that applies penalties: from logits [S, V] float32, the tokens of a row contiguous, the counts and
#: the rows of slots of :class:`Penalties`, and a batch, to penalised logits, a new float32 [S, V].
Penalise = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SamplingBatch], torch.Tensor]

#: the bit of a count that marks a token of the prompt
IN_PROMPT = 1 << 30


class Penalties:
    """Counts of generated tokens, and marks for tokens of the prompt, for slots with penalties.

    Counting happens on the device, so a step includes tokens that the host has not read yet. Memory is one
    int32 row of the vocabulary per slot with penalties, allocated on first use and reused by later requests.
    Row 0 stays empty and serves all slots without penalties: neutral penalties, or empty counts, change no
    bit of a logit.
    """

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, penalise: Penalise | None = None
    ) -> None:
        """``penalise`` is the kernel that applies penalties; None for torch's operations."""
        self._penalise = penalise
        self._vocab_size = vocab_size
        self._device = device
        #: [slots] row of ``_counts`` of each slot; 0 for none
        self._row_of = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._used: dict[int, int] = {}
        self._free: list[int] = []
        #: [rows, V] int32: how often the token was sampled, plus IN_PROMPT for a token of the prompt
        self._counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)

    def reset(self, resets: Sequence[PenaltyReset]) -> None:
        """Requests took these slots: set their counts, or release the rows of slots without penalties."""
        for reset in resets:
            if not reset.penalised:
                self._release(reset.slot)
                continue
            counts = self._counts_of(reset.slot).zero_()
            counts.index_fill_(0, self._to_device(reset.prompt_ids), IN_PROMPT)
            output_ids = self._to_device(reset.output_ids)
            counts.scatter_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))

    def _release(self, slot: int) -> None:
        row = self._used.pop(slot, 0)
        if row:
            self._free.append(row)
            self._row_of[slot] = 0

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Penalised logits, a new float32 [S, V]."""
        if self._penalise is not None:
            return self._penalise(logits, self._counts, self._row_of, batch)
        repetition, presence, frequency = (
            batch.repetition_penalty,
            batch.presence_penalty,
            batch.frequency_penalty,
        )
        counts = self._counts.index_select(0, self._row_of[batch.slots])
        if logits.device.type != "cpu":
            return penalise_counted(
                logits, counts, repetition.unsqueeze(1), presence.unsqueeze(1), frequency.unsqueeze(1)
            )
        # Few counts are nonzero, and finding them is cheaper than arithmetic on all tokens.
        rows, ids = counts.nonzero(as_tuple=True)
        result = logits.clone()
        result[rows, ids] = penalise_counted(
            logits[rows, ids], counts[rows, ids], repetition[rows], presence[rows], frequency[rows]
        )
        return result

    def record(self, batch: SamplingBatch, tokens: torch.Tensor) -> None:
        """Count sampled tokens, int64 [S], of slots with a row; negative entries are not tokens."""
        rows = self._row_of[batch.slots]
        counted = ((rows > 0) & (tokens >= 0)).to(torch.int32)
        cells = rows * self._vocab_size + tokens.clamp(min=0)
        self._counts.view(-1).scatter_add_(0, cells, counted)

    def _counts_of(self, slot: int) -> torch.Tensor:
        """The slot's row, [V], a new one if it has none."""
        row = self._used.get(slot)
        if row is None:
            if not self._free:
                self._grow()
            row = self._used[slot] = self._free.pop()
            self._row_of[slot] = row
        return self._counts[row]

    def _grow(self) -> None:
        """Double the rows, up to one per slot."""
        old = self._counts
        rows = min(2 * len(old), len(self._row_of) + 1)
        self._counts = torch.zeros(rows, self._vocab_size, dtype=old.dtype, device=old.device)
        self._counts[: len(old)] = old
        if old.is_cuda:
            # It may be another stream's memory, which knows nothing of what reads it here.
            old.record_stream(torch.cuda.current_stream(old.device))
        self._free.extend(range(rows - 1, len(old) - 1, -1))

    def _to_device(self, ids: Sequence[int]) -> torch.Tensor:
        """Ids as int64 on the device, by an asynchronous copy on CUDA."""
        tensor = torch.tensor(ids, dtype=torch.int64)
        if self._device.type != "cuda":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)


def penalised(batch: SamplingBatch) -> torch.Tensor:
    """The rows with a penalty that is not neutral, bool [S]."""
    return (batch.repetition_penalty != 1) | (batch.presence_penalty != 0) | (batch.frequency_penalty != 0)


def penalise_counted(
    logits: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """The repetition penalty (Keskar et al., CTRL, 2019) on prompt and output, then OpenAI's frequency and
    presence penalties on the output. Elementwise, all arguments broadcast."""
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    generated = counts & (IN_PROMPT - 1)
    return logits - frequency * generated - presence * (generated > 0)
