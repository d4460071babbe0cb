"""Block: the device-side state of the blocks that are being denoised, one block per row."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

__all__ = ["Block", "Rows"]

#: tensors with a first dimension of rows, by name: the state of blocks, or of their algorithm
Rows = dict[str, torch.Tensor]


@dataclass(slots=True)
class Block:
    """Blocks of B positions, one per row; tensors on one device, written in place by an algorithm's step.

    ``known`` marks the positions that hold a token, and ``editable`` those that may be written. Ids do not
    tell: a prompt may contain the mask token, as text.
    """

    #: [R, B] int64: the input of the next forward; the mask id at unknown positions
    ids: torch.Tensor
    #: [R, B] bool: the position holds a token, of the prompt or written by an algorithm
    known: torch.Tensor
    #: [R, B] bool: the position is not of the prompt
    editable: torch.Tensor
    #: [R] int64: position of the block in its sequence
    starts: torch.Tensor
    #: [R] int64: rounds so far
    rounds: torch.Tensor
    #: [R] bool: ids are final
    done: torch.Tensor
    #: [R] bool: the last step wrote something, so the K/V of its forward are not those of ``ids``. A row that
    #: is done, not failed and not changed is committed: its K/V are final
    changed: torch.Tensor
    #: [R] bool: logits were NaN or +inf, or allowed no token; nothing was written and the row is done
    failed: torch.Tensor
    #: [R, B] int64: the round that wrote the token, -1 for none and for the prompt
    written_in: torch.Tensor
    #: [R, B] float32: logprob of the token when it was written; 0 where none was
    logprobs: torch.Tensor
    #: [R, B] int64: of a row with a grammar, tokens of the whole block that agree with what is known and that
    #: the grammar allows; -1: none was found yet, or it ends before. See :mod:`aioinfer.diffusion.paths`
    path: torch.Tensor

    @property
    def masked(self) -> torch.Tensor:
        """[R, B] bool: the positions without a token."""
        return self.editable & ~self.known

    @property
    def positions(self) -> torch.Tensor:
        """[R, B] int64: positions in the sequence."""
        return self.starts.unsqueeze(1) + torch.arange(self.ids.shape[1], device=self.ids.device)

    def write_(self, where: torch.Tensor, tokens: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Write ``tokens`` and their ``logprobs`` where ``where``; [R, B] each."""
        self.ids.copy_(torch.where(where, tokens, self.ids))
        self.logprobs.copy_(torch.where(where, logprobs, self.logprobs))
        self.written_in.copy_(torch.where(where, self.rounds.unsqueeze(1), self.written_in))
        self.known |= where
        self.changed.copy_(where.any(1))

    def columns(self) -> Rows:
        """The tensors by name, not copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}
