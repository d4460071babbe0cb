"""RenamedTensors: some tensors of a checkpoint, under other names."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from aioinfer.checkpoint.tensors import Float8Matrix, QuantisedMatrix, Rounding, Tensors

__all__ = ["RenamedTensors"]


class RenamedTensors(Tensors):
    """Tensors of another :class:`~aioinfer.checkpoint.tensors.Tensors`, under the keys of ``stored``."""

    def __init__(self, tensors: Tensors, stored: Mapping[str, str]) -> None:
        """``stored``: names in ``tensors``, by the new ones."""
        self._tensors = tensors
        self._stored = stored

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors.shape(self._stored[name])

    def read(self, name: str) -> torch.Tensor:
        return self._tensors.read(self._stored[name])

    def rounding(self, name: str) -> Rounding | None:
        return self._tensors.rounding(self._stored[name])

    def quantised(self, name: str, at: int | None = None) -> QuantisedMatrix:
        return self._tensors.quantised(self._stored[name], at)

    def float8(self, name: str) -> Float8Matrix | None:
        return self._tensors.float8(self._stored[name])
