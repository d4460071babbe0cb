"""PackedAdapter: an adapter's matrices in one piece of memory on the model's device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from aioinfer.errors import ConfigError
from aioinfer.model.adapters.targets import LowRank

__all__ = ["PackedAdapter", "PackedLayer", "PackedPart"]

#: elements; addresses are multiples of as many
_ALIGNMENT = 64


class PackedPart(NamedTuple):
    """The summand of the outputs [start, start + len(b)) of a layer, from the products ``low`` with A:
    ``scale * low[:, first:stop] @ b.T``."""

    #: index of the layer's target
    target: int
    #: columns of the products with A
    first: int
    stop: int
    #: [count, stop - first]
    b: torch.Tensor
    start: int
    scale: float


class PackedLayer(NamedTuple):
    """The summands of one layer. The A of all its targets are one matrix."""

    #: [sum of ranks, inputs]
    a: torch.Tensor
    parts: tuple[PackedPart, ...]


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in the form that torch's and Triton's kernels read."""

    rank: int
    #: layers by their indices
    layers: Mapping[int, PackedLayer]
    #: all of its memory
    memory: torch.Tensor
    fingerprint: str

    @property
    def num_bytes(self) -> int:
        return self.memory.nbytes

    @classmethod
    def pack(
        cls,
        found: Mapping[int, list[LowRank | None]],
        dtype: torch.dtype,
        device: torch.device,
        multiple: int = 1,
        fingerprint: str = "",
    ) -> PackedAdapter:
        """Copy matrices, see :meth:`~aioinfer.model.adapters.targets.AdapterTargets.match`.

        Args:
            multiple: ranks are filled up to multiples of it, with zeros.

        Raises:
            ConfigError: a number is not finite in ``dtype``.
        """
        shapes = list(_shapes(found, multiple))
        memory = torch.zeros(sum(map(_elements, shapes)), dtype=dtype)
        _layers(memory, shapes, found, multiple, fill=True)
        if not bool(memory.isfinite().all()):
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(f"adapter: it has numbers that are not finite in {name}, the model's type")
        memory = _on_device(memory, device)
        ranks = [part.rank for entries in found.values() for part in entries if part is not None]
        layers = _layers(memory, shapes, found, multiple, fill=False)
        return cls(max(ranks), layers, memory, fingerprint)


def _padded(rank: int, multiple: int) -> int:
    return -(-rank // multiple) * multiple


def _elements(shape: tuple[int, int]) -> int:
    """Elements of a padded matrix."""
    return -(-shape[0] * shape[1] // _ALIGNMENT) * _ALIGNMENT


def _shapes(found: Mapping[int, list[LowRank | None]], multiple: int) -> Iterator[tuple[int, int]]:
    """Shapes of the matrices of each layer: A of all targets, then B of each."""
    for entries in found.values():
        parts = [part for part in entries if part is not None]
        ranks = [_padded(part.rank, multiple) for part in parts]
        yield sum(ranks), parts[0].a.shape[1]
        yield from ((len(part.b), rank) for part, rank in zip(parts, ranks, strict=True))


def _layers(
    memory: torch.Tensor,
    shapes: Sequence[tuple[int, int]],
    found: Mapping[int, list[LowRank | None]],
    multiple: int,
    *,
    fill: bool,
) -> dict[int, PackedLayer]:
    """The layers in a piece of memory; ``fill``: it is written."""
    views, at, layers = [], 0, {}
    for rows, columns in shapes:
        views.append(memory[at : at + rows * columns].view(rows, columns))
        at += _elements((rows, columns))
    each = iter(views)
    for index, entries in found.items():
        a, first, parts = next(each), 0, []
        for target, part in enumerate(entries):
            if part is None:
                continue
            b, stop = next(each), first + _padded(part.rank, multiple)
            if fill:
                a[first : first + part.rank] = part.a
                b[:, : part.rank] = part.b
            parts.append(PackedPart(target, first, stop, b, part.start, part.scale))
            first = stop
        layers[index] = PackedLayer(a, tuple(parts))
    return layers


def _on_device(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy, that is there when it is returned. Steps that run meanwhile are not waited for."""
    if device.type != "cuda":
        return memory.to(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        copy = memory.to(device)
    stream.synchronize()
    return copy
