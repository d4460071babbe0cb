"""Pooled: what the chunks of a request have given so far of what it pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioinfer.pooling import Pooling
from aioinfer.sampling.outcomes import NOT_FINITE

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Pooled"]


class Pooled:
    """Parts that were pooled of one request so far: chunk after chunk, in order."""

    __slots__ = ("_parts", "_whole", "pooling")

    def __init__(self, pooling: Pooling) -> None:
        self.pooling = pooling
        self._whole: npt.NDArray[np.float32] | None = None
        self._parts: list[npt.NDArray[Any]] = []

    def add(self, part: npt.NDArray[Any]) -> None:
        """Add the part of the next chunk; of "mean", the float64 sum over its positions. Raises
        FloatingPointError."""
        import numpy as np  # a device has imported it

        if not np.isfinite(part).all():
            raise FloatingPointError(NOT_FINITE)
        if self.pooling.kind == "mean" and self._parts:
            self._parts[0] = self._parts[0] + part
        else:
            self._parts.append(part)

    def complete(self, whole: npt.NDArray[np.float32]) -> None:
        """Another engine has pooled it."""
        self._whole = whole

    def restart(self) -> None:
        """All is computed again."""
        self._parts.clear()

    def result(self, positions: int) -> npt.NDArray[np.float32] | None:
        """The whole of a request that has ended after ``positions``: float32 [hidden], of "tokens"
        [positions, hidden], of "classes" [classes], of "choices" [tokens]. None if nothing was pooled."""
        import numpy as np

        if not self._parts:
            return self._whole
        if self.pooling.kind == "tokens":
            return np.concatenate(self._parts).astype(np.float32, copy=False)
        (found,) = self._parts
        if self.pooling.kind == "mean":
            found = found / positions
        return found.astype(np.float32, copy=False)
