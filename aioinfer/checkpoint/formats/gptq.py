"""GPTQ: 4 or 8 bits in groups with scales and zeros, ``weight = scale * (q - zero)`` (arXiv 2210.17323).

qweight [inner * bits / 32, outputs], int32     a word has neighbours along the inner dimension
qzeros  [groups, outputs * bits / 32]           a word has neighbouring outputs; one less than the zeros,
                                                but for the format "gptq_v2"
scales  [groups, outputs]
g_idx   [inner]                                 the group of each element, if those are not in order
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.formats.base import Stored, dequantised, rounding_of_groups, unpacked
from aioinfer.checkpoint.tensors import QuantisedMatrix, Rounding
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

__all__ = ["GPTQ"]


class GPTQ:
    """See :class:`~aioinfer.checkpoint.formats.base.Format`."""

    marker = "qweight"
    others = frozenset({"qzeros", "scales", "g_idx"})

    def __init__(self, config: dict[str, Any]) -> None:
        bits = config.get("bits")
        if bits not in (4, 8):
            raise ConfigError(f"model: GPTQ of {shown(bits)} bits is not supported, 4 and 8 are")
        self._bits: int = bits
        self._less = 0 if config.get("checkpoint_format") == "gptq_v2" else 1

    def quantised(self, stored: Stored) -> bool:
        return True

    def shape(self, stored: Stored) -> tuple[int, int]:
        words, outputs = stored.shape("qweight")
        each = 32 // self._bits
        inner, (groups, width) = words * each, stored.shape("scales")
        ordered = not stored.has("g_idx") or stored.shape("g_idx") == (inner,)
        if width != outputs or stored.shape("qzeros") != (groups, outputs // each) or not ordered:
            raise ConfigError(f"model: the parts of {stored.module} do not fit each other")
        return outputs, inner

    def rounding(self, stored: Stored) -> Rounding | None:
        inner, groups = self.shape(stored)[1], stored.shape("scales")[0]
        return rounding_of_groups(self._bits, inner, groups) if self._in_order(stored, groups) else None

    def matrix(self, stored: Stored) -> QuantisedMatrix:
        rounding = self.rounding(stored)
        assert rounding is not None
        values, scales, zeros = self._parts(stored)
        if rounding.bits == 8:
            # Signed, the zeros shifted as well.
            values, zeros = (values ^ 128).view(_int8()), zeros - 128
        return QuantisedMatrix(values, scales, -scales * zeros, rounding)

    def read(self, stored: Stored) -> torch.Tensor:
        values, scales, zeros = self._parts(stored)
        if not self._in_order(stored, scales.shape[1]):
            groups = stored.read("g_idx").long()
            if int(groups.min()) < 0 or int(groups.max()) >= scales.shape[1]:
                raise ConfigError(f"model: {stored.module}.g_idx names groups that do not exist")
            return (values - zeros[:, groups]) * scales[:, groups]
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
        values = unpacked(stored.read("qweight").T.contiguous(), self._bits)
        zeros = unpacked(stored.read("qzeros"), self._bits).T.float() + self._less
        return values, stored.read("scales").float().T.contiguous(), zeros


def _int8() -> Any:
    import torch

    return torch.int8
