"""Relay: sampled tokens on their way into the next step, without the host in between.

    step N     sample ──► relay[slot] ──► step N+1: input_ids of its decode rows
                   └────► copied to the host whenever it gets there

Indexed by slot and not by a ring of placeholders: what a slot's tenant wrote it reads once, in its next row,
however many steps are in flight or pass in between, and the fence keeps a new tenant from coming before.
"""

from __future__ import annotations

import torch

__all__ = ["Relay"]

#: No model has a token with this id, so a cell that was never written shows at once.
_POISON = -1


class Relay:
    """One int64 cell per slot, on the device."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._cells = torch.full((num_slots + 1,), _POISON, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        return self._cells.device

    def gather(
        self,
        input_ids: torch.Tensor,
        slots: torch.Tensor,
        num_decodes: int,
        verified: torch.Tensor | None = None,
    ) -> None:
        """Fill in the tokens of the decode rows, which are the first of ``input_ids``; and those with which
        the rows after them begin that verify drafts, at the indices ``verified``."""
        if num_decodes:
            input_ids[:num_decodes] = self.of(slots[:num_decodes])
        if verified is not None:
            input_ids[verified] = self.of(slots[num_decodes : num_decodes + len(verified)])

    def of(self, slots: torch.Tensor) -> torch.Tensor:
        """Their tokens."""
        # A cell is poison only if the step that should have written it failed. That request has
        # ended; its row must not fail the step for the others.
        return self._cells[slots].clamp_(min=0)

    def named(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids, int64, with the token of the slot ``-id`` where an id is negative."""
        return torch.where(ids < 0, self.of((-ids).clamp_(min=0)), ids)

    def scatter(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Leave the sampled tokens for the next step."""
        self._cells[slots] = tokens
