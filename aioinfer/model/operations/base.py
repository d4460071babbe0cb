"""Operations: the interface of a layer's computations between its matrix products."""

from __future__ import annotations

from typing import Protocol

import torch

from aioinfer.model.gates import Gate
from aioinfer.model.norm import Norm

__all__ = ["Operations"]


class Operations(Protocol):
    """Elementwise and rowwise operations: a token's result does not depend on the batch.

    Half precision dtypes are rounded where transformers rounds them, see
    :class:`~aioinfer.model.operations.torch_operations.TorchOperations`; by native kernels
    only where they are stored.
    """

    def add_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the output of a layer's last part to the residual, and norm the sum.

        Args:
            hidden: [T, hidden], the residual; not changed.
            delta: [T, hidden], added to it, or None.
            norm: the norm of the sum.

        Returns:
            the new residual and its norm, [T, hidden] each
        """

    def gate_mul(self, gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
        """``gate(gates) * up``, [T, n], of ``gate_up`` [T, 2 * n], the columns of gates first."""
