"""Operations: what a layer computes between its matrix products, as the models call it."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Operations"]


class Operations(Protocol):
    """Element by element and row by row: a token's result does not depend on its company.

    Half types are rounded where transformers rounds them, see
    :class:`~aioinfer.model.operations.torch_operations.TorchOperations`.
    """

    def add_rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what the last part of a layer made to the residual, and norm the sum.

        Args:
            hidden: [T, hidden], the residual; not changed.
            delta: [T, hidden] to add to it, or None.
            weight: [hidden]
            eps: what is added to the mean square.

        Returns:
            The new residual and its root mean square norm (Zhang and Sennrich, 2019), [T, hidden] each.
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[T, 2 * n], gates and then what they gate, to ``silu(gate) * up``, [T, n]."""
