"""GPTQ: 4 or 8 bits in groups with scales and zeros, ``weight = scale * (q - zero)`` (arXiv 2210.17323).

    qweight [inner * bits / 32, outputs], int32     a word has neighbours along the inner dimension
    qzeros  [groups, outputs * bits / 32]           a word has neighbouring outputs; in the first version of
                                                    the format less 1 in each place
    scales  [groups, outputs]
    g_idx   [inner]                                 the group of each element, if those are not in order

Files of symmetric weights state the first version and hold zeros of the second, too: there the zeros tell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.formats.base import (
    Stored,
    dequantised,
    dequantised_elements,
    rounding_of_groups,
    unpacked,
)
from aioinfer.checkpoint.tensors import Float8Matrix, QuantisedMatrix, Rounding
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

__all__ = ["GPTQ"]

#: 1 in each place of a word
_ONES = {4: 0x11111111, 8: 0x01010101}


class GPTQ:
    """See :class:`~aioinfer.checkpoint.formats.base.Format`."""

    marker = "qweight"
    others = frozenset({"qzeros", "scales", "g_idx"})
    stacks = False

    def __init__(self, config: dict[str, Any]) -> None:
        bits = config.get("bits")
        if bits not in (4, 8):
            raise ConfigError(f"model: GPTQ of {shown(bits)} bits is not supported, 4 and 8 are")
        if config.get("dynamic"):
            raise ConfigError("model: GPTQ with settings of its own for some modules is not supported")
        self._bits: int = bits
        version = str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()
        self._second = version == "gptq_v2"
        self._symmetric = config.get("sym") is True
        self._shuffled = config.get("desc_act") is True

    def quantised(self, stored: Stored) -> bool:
        return True

    def shape(self, stored: Stored) -> tuple[int, int]:
        words, outputs = stored.shape("qweight")
        each = 32 // self._bits
        inner, (groups, width) = words * each, stored.shape("scales")
        ordered = not stored.has("g_idx") or stored.shape("g_idx") == (inner,)
        if self._shuffled and groups > 1:
            ordered = stored.shape("g_idx") == (inner,)
        if width != outputs or stored.shape("qzeros") != (groups, outputs // each) or not ordered:
            raise ConfigError(f"model: the parts of {stored.module} do not fit each other")
        return outputs, inner

    def rounding(self, stored: Stored) -> Rounding | None:
        inner, groups = self.shape(stored)[1], stored.shape("scales")[0]
        return rounding_of_groups(self._bits, inner, groups) if self._in_order(stored, groups) else None

    def matrix(self, stored: Stored) -> QuantisedMatrix:
        import torch

        rounding = self.rounding(stored)
        assert rounding is not None
        values, scales, zeros = self._parts(stored)
        if rounding.bits == 8:
            # Signed, the zeros shifted as well.
            values, zeros = (values ^ 128).view(torch.int8), zeros - 128
        return QuantisedMatrix(values, scales, -scales * zeros, rounding)

    def float8(self, stored: Stored) -> Float8Matrix | None:
        return None

    def read(self, stored: Stored) -> torch.Tensor:
        values, scales, zeros = self._parts(stored)
        if not self._in_order(stored, scales.shape[1]):
            return dequantised_elements(stored, "g_idx", values, scales, zeros)
        group = values.shape[1] // scales.shape[1]
        # As of 4 bits: the offsets say what is subtracted.
        return dequantised(QuantisedMatrix(values, scales, -scales * zeros, Rounding(4, group)))

    def _in_order(self, stored: Stored, groups: int) -> bool:
        """Whether neighbours share groups of equal size."""
        import torch

        inner = self.shape(stored)[1]
        if inner % groups:
            return False
        expected = torch.arange(inner) // (inner // groups)
        return not stored.has("g_idx") or torch.equal(stored.read("g_idx").long(), expected)

    def _parts(self, stored: Stored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values [outputs, inner], scales and zeros [outputs, groups]."""
        import torch

        values = unpacked(stored.words("qweight").T.contiguous(), self._bits)
        words, second = stored.words("qzeros"), self._second
        if self._symmetric:
            half = 2 ** (self._bits - 1)
            second = bool((unpacked(words, self._bits) == half).all())
        if not second:
            # In whole words: a place that was 0 has borrowed from the next.
            words = words + torch.tensor(_ONES[self._bits], dtype=torch.int32)
        zeros = unpacked(words, self._bits).T.float()
        if self._symmetric and bool((zeros != half).any()):
            raise ConfigError(f"model: {stored.module} is said to be symmetric, and its zeros are not")
        return values, stored.read("scales").float().T.contiguous(), zeros
