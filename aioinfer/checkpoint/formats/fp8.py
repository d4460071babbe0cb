"""FP8: weights as float8 with a scale of the tensor, of each output, or of each block.

DeepSeek's and Qwen's releases have ``weight_scale_inv`` for blocks of 128 by 128, with partial ones at the
edges (arXiv 2412.19437, section 3.3); compressed-tensors has ``weight_scale``. Scales of activations are not
used: activations are not rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from aioinfer.checkpoint.formats.base import Stored, row_slices
from aioinfer.checkpoint.tensors import Float8Matrix, QuantisedMatrix, Rounding
from aioinfer.errors import ConfigError, shown

if TYPE_CHECKING:
    import torch

__all__ = ["FP8"]


_E4M3 = "float8_e4m3fn"
_TYPES = (_E4M3, "float8_e5m2")


class FP8:
    """See :class:`~aioinfer.checkpoint.formats.base.Format`."""

    marker = "weight"
    others = frozenset(
        {"weight_scale", "weight_scale_inv", "input_scale", "output_scale", "activation_scale"}
    )

    def __init__(self, config: dict[str, Any]) -> None:
        block = config.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list)
            and len(block) == 2
            and all(type(size) is int and size > 0 for size in block)
        ):
            raise ConfigError(f"model: weight_block_size must be two sizes, got {shown(block)}")
        self._block: tuple[int, int] | None = None if block is None else (block[0], block[1])

    @classmethod
    def compressed(cls, config: dict[str, Any]) -> Self:
        """As compressed-tensors describes it."""
        blocks = {
            tuple(group["weights"]["block_structure"])
            for group in config["config_groups"].values()
            if group["weights"].get("strategy") == "block"
        }
        if len(blocks) > 1:
            raise ConfigError("model: blocks of several sizes are not supported")
        return cls({"weight_block_size": list(*blocks) or None})

    def quantised(self, stored: Stored) -> bool:
        return stored.has("weight_scale") or stored.has("weight_scale_inv") or _is_float8(stored)

    def shape(self, stored: Stored) -> tuple[int, int]:
        rows, inner = stored.shape("weight")
        stored.shape(self._scale(stored))
        return rows, inner

    def read(self, stored: Stored) -> torch.Tensor:
        import torch

        weight, scale, (height, width) = self._parts(stored)
        rows, inner = weight.shape
        if scale.shape in ((1, 1), (rows, 1)):
            return weight.float().mul_(scale)
        found = torch.empty(rows, inner)
        for each in row_slices(rows, inner, height):
            blocks = scale[each.start // height : -(-each.stop // height)]
            wide = blocks.repeat_interleave(width, dim=1)[:, :inner].repeat_interleave(height, dim=0)
            found[each] = weight[each].float() * wide[: each.stop - each.start]
        return found

    def float8(self, stored: Stored) -> Float8Matrix | None:
        found = self._parts(stored)
        return found if str(found.values.dtype) == f"torch.{_E4M3}" else None

    def _parts(self, stored: Stored) -> Float8Matrix:
        """The weight, of either type, its scales in two dimensions, and their block. Raises ConfigError."""
        weight, part = stored.typed("weight", *_TYPES), self._scale(stored)
        scale = stored.read(part).float()
        rows, inner = weight.shape
        if scale.numel() == 1:
            return Float8Matrix(weight, scale.reshape(1, 1), (rows, inner))
        if scale.shape in ((rows,), (rows, 1)):
            return Float8Matrix(weight, scale.reshape(rows, 1), (1, inner))
        if self._block is None:
            raise ConfigError(f"model: {stored.module}.{part} is shaped {tuple(scale.shape)} without blocks")
        height, width = self._block
        stored.expect(part, scale, -(-rows // height), -(-inner // width))
        return Float8Matrix(weight, scale, (min(height, rows), min(width, inner)))

    def _scale(self, stored: Stored) -> str:
        """The name of the part with the scales."""
        return "weight_scale_inv" if stored.has("weight_scale_inv") else "weight_scale"

    def rounding(self, stored: Stored) -> Rounding | None:
        return None

    def matrix(self, stored: Stored) -> QuantisedMatrix:
        raise AssertionError(f"{stored.module} is not of whole numbers")


def _is_float8(stored: Stored) -> bool:
    return str(stored.read("weight").dtype).removeprefix("torch.") in _TYPES
