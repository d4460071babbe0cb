"""Penalties: token counts that live on the device, by slot, so that they never wait for the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from aioinfer.sampling.batch import PenaltyReset, SamplingBatch

__all__ = ["Penalise", "Penalties", "penalised"]

#: :func:`aioinfer.sampling.triton_logits.penalise`, or what has its arguments
Penalise = Callable[
    [
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        torch.Tensor,
        tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        int,
    ],
    torch.Tensor,
]

#: In a count: the token is in the prompt.
_IN_PROMPT = 1 << 30


class Penalties:
    """How often each token was said and whether it was in the prompt, for the slots that need to know.

    A step that is launched before the host has read the last token counts it all the same. Memory is one
    int32 row of the vocabulary per slot with penalties, made when the first of them shows up and used
    again for the next tenant. Row 0 stays empty and stands for all slots without penalties: penalties
    that are neutral, or that meet no counts, change no bit of a logit.
    """

    __slots__ = ("_counts", "_device", "_free", "_penalise", "_row_of", "_used", "_vocab_size")

    def __init__(
        self, num_slots: int, vocab_size: int, device: torch.device, penalise: Penalise | None = None
    ) -> None:
        """``penalise``: a kernel that applies penalties; torch's operations without."""
        self._penalise = penalise
        self._vocab_size = vocab_size
        self._device = device
        #: [slots] row of each slot; 0: none
        self._row_of = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self._used: dict[int, int] = {}
        self._free: list[int] = []
        #: [rows, V] times the token was sampled, plus _IN_PROMPT
        self._counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)

    def reset(self, resets: Sequence[PenaltyReset]) -> None:
        """Requests took these slots: count what was said so far, or let the slot's row serve another."""
        for reset in resets:
            if not reset.penalised:
                self._release(reset.slot)
                continue
            counts = self._counts_of(reset.slot).zero_()
            counts.index_fill_(0, self._to_device(reset.prompt_ids), _IN_PROMPT)
            output_ids = self._to_device(reset.output_ids)
            counts.scatter_add_(0, output_ids, torch.ones_like(output_ids, dtype=torch.int32))

    def _release(self, slot: int) -> None:
        row = self._used.pop(slot, 0)
        if row:
            self._free.append(row)
            self._row_of[slot] = 0

    def apply(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        """Penalised logits, a new float32 [S, V]."""
        penalties = batch.repetition_penalty, batch.presence_penalty, batch.frequency_penalty
        if self._penalise is not None:
            return self._penalise(logits, self._counts, self._row_of, batch.slots, penalties, _IN_PROMPT)
        repetition, presence, frequency = penalties
        counts = self._counts.index_select(0, self._row_of[batch.slots])
        if logits.device.type != "cpu":
            return _penalise(
                logits, counts, repetition.unsqueeze(1), presence.unsqueeze(1), frequency.unsqueeze(1)
            )
        # Few tokens were seen, and looking for them is cheaper than arithmetic on all.
        rows, ids = counts.nonzero(as_tuple=True)
        result = logits.clone()
        result[rows, ids] = _penalise(
            logits[rows, ids], counts[rows, ids], repetition[rows], presence[rows], frequency[rows]
        )
        return result

    def record(self, batch: SamplingBatch, tokens: torch.Tensor) -> None:
        """Count sampled tokens, int64 [S], where the slot has a row and the token is one."""
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
        """Twice the rows, but never more than there are slots."""
        old = self._counts
        rows = min(2 * len(old), len(self._row_of) + 1)
        self._counts = torch.zeros(rows, self._vocab_size, dtype=old.dtype, device=old.device)
        self._counts[: len(old)] = old
        self._free.extend(range(rows - 1, len(old) - 1, -1))

    def _to_device(self, ids: Sequence[int]) -> torch.Tensor:
        """Ids on the device, int64, without waiting for it."""
        tensor = torch.tensor(ids, dtype=torch.int64)
        if self._device.type != "cuda":
            return tensor.to(self._device)
        return tensor.pin_memory().to(self._device, non_blocking=True)


def penalised(batch: SamplingBatch) -> torch.Tensor:
    """Which rows have a penalty that is not neutral, bool [S]."""
    return (batch.repetition_penalty != 1) | (batch.presence_penalty != 0) | (batch.frequency_penalty != 0)


def _penalise(
    logits: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> torch.Tensor:
    """Repetition (Keskar et al., CTRL, 2019) on prompt and output, then OpenAI's frequency and presence
    on the output. Elementwise, all arguments broadcast."""
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(counts > 0, repeated, logits)
    said = counts & (_IN_PROMPT - 1)
    return logits - frequency * said - presence * (said > 0)
