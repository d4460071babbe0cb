"""Block: what is known of the tokens that are being denoised, one block per row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import torch

from aioinfer.diffusion.rows import Rows

__all__ = ["Block"]


@dataclass(slots=True)
class Block:
    """Blocks of B positions, a row each; tensors on one device, written to in place by an algorithm's step.

    Which position holds a token is what ``known`` says, and which may be written what ``editable`` says.
    Ids say neither: a prompt may spell the mask token, and then it is text like any other.
    """

    #: [R, B] int64: what the next forward reads, the mask id where nothing is known
    ids: torch.Tensor
    #: [R, B] bool: there is a token, of the prompt or of an algorithm
    known: torch.Tensor
    #: [R, B] bool: not of the prompt
    editable: torch.Tensor
    #: [R] int64: where the block begins in its sequence
    starts: torch.Tensor
    #: [R] int64: the forwards that an algorithm has had for it
    rounds: torch.Tensor
    #: [R] bool: ids are final
    done: torch.Tensor
    #: [R] bool: the last step wrote something, so the K/V of its forward are not those of ``ids``. A row that
    #: a step leaves done, not failed and not changed is committed already
    changed: torch.Tensor
    #: [R] bool: logits were NaN or +inf, or allowed nothing; then nothing was written and the row is done
    failed: torch.Tensor
    #: [R, B] int64: the round that wrote the token, -1 for none and for the prompt
    written_in: torch.Tensor
    #: [R, B] float32: how likely the token was to the model when it was written (log); 0 where none was
    logprobs: torch.Tensor

    @classmethod
    def begin(
        cls,
        given: Sequence[Sequence[int]],
        starts: Sequence[int],
        *,
        size: int,
        mask_id: int,
        device: torch.device | str = "cpu",
    ) -> Self:
        """Blocks that begin with some tokens of the prompt, none to ``size`` of them, and are unknown after.

        A row in which everything is given is done, which also makes it the row to pad a batch with.
        """
        rows = len(given)
        ids = [[*tokens, *[mask_id] * (size - len(tokens))] for tokens in given]
        lengths = torch.tensor([len(tokens) for tokens in given], dtype=torch.int64, device=device)
        known = torch.arange(size, device=device) < lengths.unsqueeze(1)
        return cls(
            ids=torch.tensor(ids, dtype=torch.int64, device=device).view(rows, size),
            known=known,
            editable=~known,
            starts=torch.tensor(starts, dtype=torch.int64, device=device),
            rounds=torch.zeros_like(lengths),
            done=known.all(1),
            changed=torch.zeros_like(lengths, dtype=torch.bool),
            failed=torch.zeros_like(lengths, dtype=torch.bool),
            written_in=torch.full_like(known, -1, dtype=torch.int64),
            logprobs=torch.zeros_like(known, dtype=torch.float32),
        )

    @property
    def masked(self) -> torch.Tensor:
        """[R, B] bool: where a token is still to be found."""
        return self.editable & ~self.known

    @property
    def positions(self) -> torch.Tensor:
        """[R, B] int64: places in the sequence."""
        return self.starts.unsqueeze(1) + torch.arange(self.ids.shape[1], device=self.ids.device)

    def write_(self, where: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Put tokens in some places; [R, B] each."""
        self.ids.copy_(torch.where(where, tokens, self.ids))
        self.logprobs.copy_(torch.where(where, logprobs, self.logprobs))
        self.written_in.copy_(torch.where(where, self.rounds.unsqueeze(1), self.written_in))
        self.known |= where
        self.changed.copy_(where.any(1))

    def columns(self) -> Rows:
        """The tensors themselves, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
