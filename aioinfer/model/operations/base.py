"""Operations: the interface of a layer's computations between its matrix products."""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["Operations"]


class Operations(Protocol):
    """Elementwise and rowwise operations: a token's result does not depend on the batch.

    Half precision dtypes are rounded where transformers rounds them, see
    :class:`~aioinfer.model.operations.torch_operations.TorchOperations`.
    """

    def add_rms_norm(
        self, hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the output of a layer's last part to the residual, and norm the sum.

        Args:
            hidden: [T, hidden], the residual; not changed.
            delta: [T, hidden], added to it, or None.
            weight: [hidden], the norm's.
            eps: added to the mean square.

        Returns:
            the new residual and its root mean square norm (Zhang and Sennrich, 2019), [T, hidden] each
        """

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """``silu(gate) * up``, [T, n], of ``gate_up`` [T, 2 * n], the columns of gate first."""
