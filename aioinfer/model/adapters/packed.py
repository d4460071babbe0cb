"""PackedAdapter: an adapter's matrices in one piece of memory on the model's device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

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
    #: [2, count] float32, factors and shifts of the outputs before that is added; None: 1 and 0
    rescaling: torch.Tensor | None


class PackedLayer(NamedTuple):
    """The summands of one layer. The A of all its targets are one matrix."""

    #: [sum of ranks, inputs]
    a: torch.Tensor
    parts: tuple[PackedPart, ...]

    def rescale(self, result: torch.Tensor, where: slice | torch.Tensor) -> None:
        """Rescale the outputs [T, outputs] of some tokens, in place."""
        for part in self.parts:
            if part.rescaling is not None:
                into = result[:, part.start : part.start + len(part.b)]
                factor, shift = part.rescaling
                into[where] = (into[where] * factor + shift).to(into.dtype)


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """An adapter in the form that torch's and Triton's kernels read."""

    rank: int
    #: layers by their indices
    layers: Mapping[int, PackedLayer]
    #: all of its memory, but for that of
    memory: torch.Tensor
    #: factors and shifts, float32
    rescaling: torch.Tensor
    fingerprint: str
    #: it was made of the model's weights, and of no use with others
    bound: bool
    #: [vocab_size, hidden], vectors of tokens of its own; None: it has the model's
    words: torch.Tensor | None

    @property
    def num_bytes(self) -> int:
        words = 0 if self.words is None else self.words.nbytes
        return self.memory.nbytes + self.rescaling.nbytes + words

    @property
    def rescales(self) -> bool:
        """Whether it changes what layers make without it."""
        return bool(self.rescaling.numel())

    @classmethod
    def pack(
        cls,
        found: Mapping[int, list[LowRank | None]],
        dtype: torch.dtype,
        device: torch.device,
        multiple: int = 1,
        fingerprint: str = "",
        *,
        rank: int = 0,
        bound: bool = False,
        words: torch.Tensor | None = None,
    ) -> PackedAdapter:
        """Copy matrices, see :meth:`~aioinfer.model.adapters.targets.AdapterTargets.match`.

        Args:
            multiple: ranks are filled up to multiples of it, with zeros.
            rank: the largest; that of an adapter without layers.

        Raises:
            ConfigError: a number is not finite in ``dtype``.
        """
        matrices = list(_matrices(found, dtype, multiple))
        # Each from a multiple of the alignment on.
        padded = [F.pad(each.flatten(), (0, -each.numel() % _ALIGNMENT)) for each in matrices]
        memory = torch.cat([torch.empty(0, dtype=dtype), *padded])
        if not bool(memory.isfinite().all()):
            name = str(dtype).removeprefix("torch.")
            raise ConfigError(f"adapter: it has numbers that are not finite in {name}, the model's type")
        memory = _on_device(memory, device)
        rescaling = _on_device(torch.cat([torch.empty(0), *_rescalings(found)]), device)
        rest = rescaling
        sizes = [len(each) for each in padded]
        views = (
            part[: each.numel()].view(each.shape)
            for part, each in zip(memory.split(sizes), matrices, strict=True)
        )
        layers: dict[int, PackedLayer] = {}
        for index, entries in found.items():
            a, first, parts = next(views), 0, []
            for target, part in enumerate(entries):
                if part is not None:
                    b, own = next(views), None
                    stop = first + b.shape[1]
                    if part.rescaling is not None:
                        own, rest = rest[: 2 * len(b)].view(2, -1), rest[2 * len(b) :]
                    parts.append(PackedPart(target, first, stop, b, part.start, part.scale, own))
                    first = stop
            layers[index] = PackedLayer(a, tuple(parts))
        words = None if words is None else _on_device(words.to(dtype), device)
        return cls(rank, layers, memory, rescaling, fingerprint, bound, words)


def _rescalings(found: Mapping[int, list[LowRank | None]]) -> Iterator[torch.Tensor]:
    """The factors and shifts of all layers in order, flat."""
    for entries in found.values():
        for part in entries:
            if part is not None and part.rescaling is not None:
                yield part.rescaling.flatten()


def _matrices(
    found: Mapping[int, list[LowRank | None]], dtype: torch.dtype, multiple: int
) -> Iterator[torch.Tensor]:
    """The matrices of each layer, their ranks filled up to multiples with zeros: A of all targets, then B of
    each."""
    for entries in found.values():
        parts = [part for part in entries if part is not None]
        more = [-part.rank % multiple for part in parts]
        yield torch.cat([F.pad(part.a.to(dtype), (0, 0, 0, n)) for part, n in zip(parts, more, strict=True)])
        yield from (F.pad(part.b.to(dtype), (0, n)) for part, n in zip(parts, more, strict=True))


def _on_device(memory: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy, that is there when it is returned. Steps that run meanwhile are not waited for."""
    if device.type != "cuda":
        return memory.to(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        copy = memory.to(device)
    stream.synchronize()
    return copy
