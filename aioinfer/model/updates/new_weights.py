"""NewWeights: the tensors of an update, as the code that built a model takes them again.

Of a set that is not complete, a tensor that is missing reads as NaN, which no given one has. All that is
computed from it, by norms that store their weights less one, by joining heads, is NaN in the elements that
depend on it: there the old values stay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from aioinfer.checkpoint.tensors import Tensors
from aioinfer.errors import ConfigError
from aioinfer.model.weights import StoredMatrix, Weights

__all__ = ["Known", "NewWeights", "is_missing", "merged"]


class Known(NamedTuple):
    """The facts about the tensors that a model was built from."""

    names: frozenset[str]
    #: the head is the embedding
    tied: bool


class NewWeights(Weights):
    """Weights of an update."""

    def __init__(
        self,
        tensors: Tensors,
        known: Known,
        *,
        partial: bool,
        mapped: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``partial``: tensors may be missing that the model was built from; ``mapped``: they are those of a
        file, which stays as it is."""
        super().__init__(tensors, dtype=dtype, device=device)
        self._known = known
        self.partial = partial
        self.mapped = mapped
        #: elements of the largest tensor
        self.largest = 0
        #: names in the order in which they were asked for
        self._asked: list[str] = []
        #: types of those that were not taken in that of the model
        self._kinds: dict[str, torch.dtype] = {}

    def __contains__(self, name: object) -> bool:
        return name in self.names or (self.partial and name in self._known.names)

    def given(self, names: Sequence[str]) -> int:
        """Number of these that are given."""
        return sum(name in self.names for name in names)

    @property
    def kinds(self) -> dict[str, torch.dtype]:
        """Types in which the model has the tensors that were taken."""
        return {name: self._kinds.get(name, self.dtype) for name in self.used}

    def check_any(self) -> None:
        """Raise ConfigError if none of the tensors is asked for."""
        if not self.given(self._asked):
            raise ConfigError("model: no tensor is one that the model has")

    def asked_since(self, start: int) -> list[str]:
        """The tensors that were declared after the first ``start``."""
        return self._asked[start:]

    @property
    def num_asked(self) -> int:
        return len(self._asked)

    def whole(self, names: Sequence[str], what: str) -> bool:
        """Whether all of these are given; False if none is. Raises ConfigError for some of them, which are
        kept as one matrix."""
        count = self.given(names)
        if count in (0, len(names)):
            return bool(count) or not names
        missing = next(name for name in names if name not in self.names)
        raise ConfigError(f"model: {missing} is missing: {what} can be replaced together only")

    def declare(self, name: str, shape: tuple[int, ...]) -> None:
        self._asked.append(name)
        if self._lacks(name):
            return
        self.largest = max(self.largest, math.prod(shape))
        super().declare(name, shape)

    def _lacks(self, name: str) -> bool:
        return self.partial and name not in self.names and name in self._known.names

    def take(self, name: str, shape: tuple[int, ...], *, dtype: torch.dtype | None = None) -> torch.Tensor:
        if not self._lacks(name):
            self._kinds[name] = dtype or self.dtype
            return super().take(name, shape, dtype=dtype)
        self.declare(name, shape)
        # One element: a missing table is as large as the rest of the model.
        return torch.tensor(math.nan, dtype=dtype or self.dtype, device=self._device).expand(shape)

    def differs(self, name: str, other: str) -> bool:
        """Whether the model has a head of its own. Raises ConfigError: it has none, and one is given."""
        if self._known.tied and name in self.names and other not in self.names:
            raise ConfigError(f"model: {name} is {other} here, which is missing")
        if self._known.tied and super().differs(name, other):
            raise ConfigError(f"model: {name} is not {other}, and the model has one matrix for both")
        return not self._known.tied

    def parts(self, stored: StoredMatrix) -> tuple[bool, bool]:
        """Whether the weights of a matrix are given, and its biases. Raises ConfigError for some of them."""
        weights, biases = stored.tensors
        what = " ".join(name.rpartition(".")[0] for name in weights)
        stored.declare_biases()
        return self.whole(weights, what), bool(biases) and self.whole(biases, f"the biases of {what}")


def is_missing(tensor: torch.Tensor) -> bool:
    """Whether all of a tensor depends on missing ones."""
    if tensor.numel() > 1 and not any(tensor.stride()):
        return bool(tensor.flatten()[:1].isnan())
    return bool(tensor.isnan().all())


def merged(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """A new tensor of ``old``'s type with the values of ``new``, and those of ``old`` where these are
    missing. It shares no memory with ``new``."""
    new = new.to(old)
    missing = new.isnan()
    return torch.where(missing, old, new) if bool(missing.any()) else new.clone()
