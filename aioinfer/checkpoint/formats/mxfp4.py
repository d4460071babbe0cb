"""MXFP4: the experts of gpt-oss as floats of 4 bits, 32 of which share a power of two.

That is the format of the OCP Microscaling Formats, version 1.0. A stacked matrix ``name`` is stored as
``name_blocks`` [experts, rows, groups, 16] or [experts, rows, groups * 16], two floats a byte, the lower four
bits first, and ``name_scales`` [experts, rows, groups], exponents plus 127. transformers has it transposed:
[experts, 32 * groups, rows].
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from aioinfer.checkpoint.formats.base import NothingQuantised, dequantised
from aioinfer.checkpoint.tensors import FLOAT4, QuantisedMatrix, Rounding, Tensors
from aioinfer.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["MXFP4Tensors"]

_BLOCKS, _SCALES = "_blocks", "_scales"
#: bytes of a group
_BYTES = 16
_ROUNDING = Rounding(4, 2 * _BYTES, FLOAT4)
_BIAS = 127
#: the exponent, plus that, whose numbers bfloat16 has, up to 6 times 2 to that power; 255 is no number
_LARGEST = 252


class MXFP4Tensors(Tensors):
    """Tensors with stacks of experts in this format."""

    def __init__(self, tensors: Tensors) -> None:
        """Raises ConfigError if blocks have no scales, or if sizes do not fit."""
        self._tensors = tensors
        self._shapes: dict[str, tuple[int, ...]] = {}
        names = set(tensors.names)
        for name in tensors.names:
            if name.endswith(_BLOCKS):
                own = name.removesuffix(_BLOCKS)
                self._shapes[own] = self._shape(own)
                names -= {name, f"{own}{_SCALES}"}
                if own in names:
                    raise ConfigError(f"model: {own} is in the checkpoint quantised and not quantised")
        if not self._shapes:
            raise NothingQuantised
        self._names = frozenset(names | self._shapes.keys())

    @property
    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes.get(name) or self._tensors.shape(name)

    def read(self, name: str) -> torch.Tensor:
        """One tensor; one that is quantised in bfloat16, which has all of its numbers."""
        import torch

        if name not in self._shapes:
            return self._tensors.read(name)
        experts, inner, rows = self._shapes[name]
        found = torch.empty(experts, rows, inner, dtype=torch.bfloat16)
        for expert in range(experts):
            found[expert] = dequantised(self.quantised(name, expert))
        return found.mT

    def rounding(self, name: str) -> Rounding | None:
        return _ROUNDING if name in self._shapes else None

    def quantised(self, name: str, at: int | None = None) -> QuantisedMatrix:
        """A matrix of a stack as rows of its outputs, which transformers has transposed."""
        import torch

        blocks, scales = self._tensors.read(f"{name}{_BLOCKS}"), self._tensors.read(f"{name}{_SCALES}")
        for part, found in ((_BLOCKS, blocks), (_SCALES, scales)):
            if found.dtype != torch.uint8:
                raise ConfigError(f"model: {name}{part} is of {found.dtype}, not uint8")
        exponents, packed = scales[at], blocks[at].view(scales.shape[1], -1)
        if bool((exponents > _LARGEST).any()):
            raise ConfigError(f"model: {name}{_SCALES} has scales beyond those of bfloat16")
        values = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
        # Of numbers that are twice as large.
        factors = torch.ldexp(torch.ones(exponents.shape), exponents.int() - _BIAS - 1)
        return QuantisedMatrix(values, factors, None, _ROUNDING)

    def _shape(self, name: str) -> tuple[int, int, int]:
        """The shape of a tensor, from those of its parts. Raises ConfigError."""
        scales = f"{name}{_SCALES}"
        if scales not in self._tensors.names:
            raise ConfigError(f"model: {name} is quantised, and the checkpoint has no {scales}")
        blocks, found = self._tensors.shape(f"{name}{_BLOCKS}"), self._tensors.shape(scales)
        if len(found) != 3:
            raise ConfigError(f"model: {scales} is shaped {found}, not [experts, rows, groups]")
        experts, rows, groups = found
        if blocks not in ((*found, _BYTES), (experts, rows, groups * _BYTES)):
            raise ConfigError(f"model: {name}{_BLOCKS} is shaped {blocks}, with scales {found}")
        return experts, groups * 2 * _BYTES, rows
