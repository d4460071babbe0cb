"""AWQ: 4 bits in groups with scales and zeros, ``weight = scale * (q - zero)`` (arXiv 2306.00978).

qweight [inner, outputs / 8], int32     a word has outputs 0 2 4 6 1 3 5 7, the lowest bits first
qzeros  [groups, outputs / 8]           in the same order
scales  [groups, outputs]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aioinfer.checkpoint.formats.base import Stored, ZeroPoints, unpacked
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

__all__ = ["AWQ"]

#: place in a word of each of eight neighbouring outputs
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class AWQ(ZeroPoints):
    """The format of AutoAWQ."""

    marker = "qweight"
    others = frozenset({"qzeros", "scales"})
    bits = 4

    def __init__(self, config: dict[str, Any]) -> None:
        bits, version = config.get("bits", config.get("w_bit")), str(config.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise ConfigError(
                f"model: AWQ of {shown(bits)} bits in the layout {shown(version)} is not supported"
            )

    def shape(self, stored: Stored) -> tuple[int, int]:
        inner, words = stored.shape("qweight")
        groups, outputs = stored.shape("scales")
        if outputs != words * 8 or inner % groups or stored.shape("qzeros") != (groups, words):
            raise ConfigError(f"model: the parts of {stored.module} do not fit each other")
        return outputs, inner

    def groups(self, stored: Stored) -> int:
        return stored.shape("scales")[0]

    def parts(self, stored: Stored) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values, zeros = (
            unpacked(stored.typed(part, "int32"), 4, _PLACES.__getitem__) for part in ("qweight", "qzeros")
        )
        scales = stored.floats("scales").T.contiguous()
        return values.T.contiguous(), scales, zeros.T.float()
