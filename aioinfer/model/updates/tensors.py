"""Tensors from a caller, and checks of weights before anything is changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

import torch

from aioinfer.checkpoint.tensors import Float8Matrix, QuantisedMatrix, Rounding, Tensors
from aioinfer.errors import ConfigError, shown

__all__ = ["GivenTensors", "check_values"]

#: elements that are examined at a time: torch uses no threads for them, which would slow running steps
_SLICE = 1 << 15
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class GivenTensors:
    """Tensors in memory, by name; see :class:`~aioinfer.checkpoint.tensors.Tensors`. They are not copied."""

    def __init__(self, items: Iterable[tuple[object, object]]) -> None:
        """Raise ConfigError if an item is no name and tensor of floating-point numbers, or comes twice."""
        self._tensors: dict[str, torch.Tensor] = {}
        for item in items:
            if not isinstance(item, tuple) or len(item) != 2:
                raise ConfigError(f"model: items must be pairs of name and tensor, got {shown(item)}")
            name, tensor = item
            if not isinstance(name, str):
                raise ConfigError(f"model: names of tensors must be text, got {shown(name)}")
            if name in self._tensors:
                raise ConfigError(f"model: {name[:200]} is there twice")
            self._tensors[name] = _checked(name[:200], tensor)
        if not self._tensors:
            raise ConfigError("model: there are no tensors")

    @property
    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def rounding(self, name: str) -> Rounding | None:
        return None

    def quantised(self, name: str, at: int | None = None) -> QuantisedMatrix:
        raise AssertionError(f"{name} is not quantised")

    def float8(self, name: str) -> Float8Matrix | None:
        return None


def _checked(name: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"model: {name} must be a tensor of torch, got {shown(tensor)}")
    if tensor.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ConfigError(f"model: {name} is of type {tensor.dtype}; weights are one of {known}")
    if tensor.is_meta or tensor.layout is not torch.strided or type(tensor.data) is not torch.Tensor:
        raise ConfigError(f"model: {name} is no plain tensor in memory: {type(tensor).__name__}")
    return tensor.detach()


def check_values(
    tensors: Tensors,
    kinds: Mapping[str, torch.dtype],
    go_on: Callable[[], None],
    kept: Collection[str] = (),
) -> None:
    """Read tensors once, as they will be read when they are written: that brings those of files into memory,
    and finds faults of a file while nothing has changed. ``go_on`` is called again and again, and may raise.

    Args:
       kinds: by name, the type in which the model has its numbers.
       kept: names of matrices that stay as they are quantised.

    Raises:
       ConfigError: the first that cannot be read, that has infinity or NaN, or a number that its type in the
           model does not have.
    """
    for name, kind in kinds.items():
        go_on()
        if name in kept:
            shape = tensors.shape(name)
            for at in range(shape[0]) if len(shape) > 2 else [None]:
                matrix = tensors.quantised(name, at)
                factors = [each for each in (matrix.scales, matrix.offsets) if each is not None]
                if not all(bool(each.isfinite().all()) for each in factors):
                    raise ConfigError(f"model: the factors of {name} have infinity or NaN")
            continue
        tensor = tensors.read(name)
        if not tensor.is_floating_point():
            continue
        tensor = tensor if tensor.dtype in _DTYPES else tensor.float()
        if not _fits(tensor, kind, go_on):
            if bool(tensor.isfinite().all()):
                raise ConfigError(f"model: {name} has numbers beyond those of {kind}")
            raise ConfigError(f"model: {name} has infinity or NaN")


def _fits(tensor: torch.Tensor, kind: torch.dtype, go_on: Callable[[], None]) -> bool:
    """Whether all numbers are finite in another type."""
    for index, part in enumerate(tensor.flatten().split(_SLICE)):
        if index % 64 == 0:
            go_on()
        if not bool(part.to(kind).isfinite().all()):
            return False
    return True
